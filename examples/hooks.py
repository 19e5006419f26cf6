"""Write your own intervention: five functions, the text that each leads to, and the largest value that it gives.

python examples/hooks.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm import LLM, SamplingParams

import vllm_weir as weir

LAYER = 3
PROMPT = "Tom went to the garden. Tom was"


def probe_and_steer(rows: Any, ctx: Any) -> Any:
    """A nonlinear probe decides how much is added: rows + relu(w . h) w."""
    score = torch.relu(rows @ ctx.args["w"])
    return rows + ctx.args["scale"] * score[:, None] * ctx.args["w"], {"score": score}


def clamp_norm(rows: Any, ctx: Any) -> Any:
    """No row is longer than `most`."""
    norms = rows.norm(dim=1, keepdim=True)
    return rows * (ctx.args["most"] / norms).clamp(max=1.0), {"norm": norms[:, 0]}


def value_head(rows: Any, ctx: Any) -> Any:
    """A moving average over the sequence, which every token goes on from."""
    values = []
    for row in rows:
        ctx.state = 0.8 * ctx.state + 0.2 * torch.tanh(row @ ctx.args["w"])
        values.append(ctx.state.clone())
    ctx.saved["last"] = ctx.state
    return None, {"value": torch.cat(values)}


def own_autoencoder(rows: Any, ctx: Any) -> Any:
    """Half of each row is what an autoencoder that Weir does not know makes of it."""
    before = rows @ ctx.args["encoder"]
    acts = (before > 0.5) * before
    return 0.5 * rows + 0.5 * acts @ ctx.args["decoder"], {"active": (acts > 0).sum(1)}


def without_top_neurons(rows: Any, ctx: Any) -> Any:
    """The neurons that fire most are silenced, at each token others."""
    top = rows.topk(ctx.args["k"], dim=1).indices
    return rows.scatter(1, top, 0.0)


def hooks(d_model: int) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Return each function with its hook point, layers and args."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[0] ** 0.5

    w = 3 * draw(d_model)
    return {
        "probe and steer": (probe_and_steer, {"layers": LAYER, "args": {"w": w, "scale": 4.0}}),
        "clamp the norm": (clamp_norm, {"hook": "resid_pre", "layers": LAYER, "args": {"most": 40.0}}),
        "value head": (value_head, {"layers": LAYER, "args": {"w": w}, "state": (1,)}),
        "own autoencoder": (
            own_autoencoder,
            {"layers": LAYER, "args": {"encoder": draw(d_model, 512), "decoder": draw(512, d_model)}},
        ),
        "without top neurons": (without_top_neurons, {"hook": "mlp_post", "layers": LAYER, "args": {"k": 32}}),
    }


def main() -> None:
    llm = LLM(weir.demo_model(), dtype="float32", max_model_len=256, kv_cache_memory_bytes=256 << 20)
    plain = SamplingParams(max_tokens=8, temperature=0)
    chosen = hooks(llm.llm_engine.model_config.get_hidden_size())
    params = [plain, *(weir.params(plain, hooks=weir.Hook(one, **given)) for one, given in chosen.values())]
    outs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    for name, out in zip(("nothing", *chosen), outs, strict=True):
        values = {key: round(float(value.max()), 3) for key, value in (out.values or {}).items()}
        print(f"{name:20} {out.outputs[0].text!r} {values or ''}")


if __name__ == "__main__":
    main()
