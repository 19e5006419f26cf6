"""Functions of users, and the same functions in the reference."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

import vllm_weir as weir


def probe_and_steer(rows: Any, ctx: Any) -> Any:
    """A nonlinear probe decides how much is added."""
    w = ctx.args["w"]
    return rows + ctx.args["scale"] * torch.relu(rows @ w)[:, None] * w, {"probe": rows @ w}


def clamp_norm(rows: Any, ctx: Any) -> Any:
    norms = rows.norm(dim=1, keepdim=True)
    return rows * (ctx.args["most"] / norms).clamp(max=1.0), {"norm": norms[:, 0]}


def averaged(rows: Any, ctx: Any) -> Any:
    """A value head with a moving average, which each position goes on from."""
    out, said = rows.clone(), []
    for k in range(len(rows)):
        ctx.state = 0.5 * ctx.state + 0.5 * (rows[k] @ ctx.args["w"])
        out[k] += ctx.state * ctx.args["w"]
        said.append(ctx.state.clone())
    return out, {"smoothed": torch.cat(said)}


def smoothed(rows: Any, ctx: Any) -> Any:
    returned = averaged(rows, ctx)
    ctx.saved["last"] = ctx.state
    return returned


def without_top(rows: Any, ctx: Any) -> Any:
    """The neurons that fire most are silenced."""
    top = rows.topk(ctx.args["k"], dim=1).indices
    return rows.scatter(1, top, 0.0)


def mixed(rows: Any, ctx: Any) -> Any:
    return rows @ ctx.args["matrix"]


def reconstructed(rows: Any, ctx: Any) -> Any:
    """A gated autoencoder."""
    before = rows @ ctx.args["encoder"]
    acts = (before > 0.1) * torch.relu(before)
    return acts @ ctx.args["decoder"] + 0.5 * rows, {"active": (acts > 0).sum(1)}


def turned(rows: Any, ctx: Any) -> Any:
    """Heads [n, heads, d_head] change places, and each gets a factor of its own."""
    return rows.flip(1) * ctx.args["factors"][list(ctx.heads)][:, None], {"heads": rows.norm(dim=2)}


def sharpened(rows: Any, ctx: Any) -> Any:
    """Neurons [n, neurons] by their number."""
    return torch.tanh(rows) * ctx.args["factors"][list(ctx.neurons)], {"neurons": rows}


def read_off(rows: Any, ctx: Any) -> Any:
    """What the model's own unembedding says."""
    gain = ctx.parameter("model.norm.weight").expand(len(rows), -1)
    return None, {"logits": rows @ ctx.parameter("lm_head.weight").T, "gain": gain}


def output_weights(rows: Any, ctx: Any) -> Any:
    ctx.parameter("model.layers.1.self_attn.o_proj.weight")


def breaks_at_31(rows: Any, ctx: Any) -> Any:
    if ctx.positions[-1] > 30:
        raise ValueError("enough")


def cases(
    d: int, d_mlp: int, d_z: int, seed: int = 4, mode: str = "eager"
) -> list[tuple[Callable[..., Any], dict[str, Any]]]:
    """Six functions with the rest of a `weir.Hook`'s arguments."""
    stateful = averaged if mode == "compiled" else smoothed
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator) / shape[0] ** 0.5
    every: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (probe_and_steer, {"hook": "resid_post", "layers": [1, 2], "args": {"w": 2 * draw(d), "scale": 3.0}}),
        (clamp_norm, {"hook": "resid_pre", "layers": 2, "args": {"most": 9.0}}),
        (stateful, {"hook": "resid_post", "layers": 0, "args": {"w": draw(d)}, "state": (1,), "positions": "3:"}),
        (without_top, {"hook": "mlp_post", "layers": "all", "args": {"k": 8}}),
        (mixed, {"hook": "z", "layers": [1], "args": {"matrix": 2 * draw(d_z, d_z)}, "positions": "generated"}),
        (
            reconstructed,
            {"hook": "resid_post", "layers": [3], "args": {"encoder": draw(d, 64), "decoder": draw(64, d)}},
        ),
    ]
    return [(function, given | {"mode": mode}) for function, given in every]


def of_parts(d_mlp: int, mode: str = "eager") -> list[tuple[Callable[..., Any], dict[str, Any]]]:
    """Functions of some heads, of which there are 4, with 2 of keys, or of some neurons."""
    factors = torch.randn(d_mlp, generator=torch.Generator().manual_seed(6))
    every: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (turned, {"hook": "z", "layers": [1, 2], "heads": [3, 0, 1], "args": {"factors": factors}}),
        (turned, {"hook": "k", "layers": "all", "heads": 1, "args": {"factors": factors}, "positions": "prompt"}),
        (turned, {"hook": "q", "layers": 2, "heads": [2, 1], "args": {"factors": factors}}),
        (sharpened, {"hook": "mlp_post", "layers": 1, "neurons": [150, 2, 77], "args": {"factors": factors}}),
    ]
    return [(function, given | {"mode": mode}) for function, given in every]


class Applied:
    """What a hook does in a `SteeredOracle`: the function is given all selected rows at once.

    `values` is what it gave at the last block.
    """

    vectors: dict[str, Any] = {}  # noqa: RUF012 - as of an intervention
    heads = neurons = None
    numbers, per_layer = "", False

    def __init__(self, function: Callable[..., Any], hook: weir.Hook, given: dict[str, Any]) -> None:
        self._function, self._given, self._hook = function, given, hook
        self.values: dict[str, torch.Tensor] = {}
        self.hook, self.layers, self.positions = hook.hook, hook.layers, hook.positions

    def changed(self, rows: torch.Tensor) -> torch.Tensor:
        new = rows.clone()
        heads, neurons = self._hook.heads, self._hook.neurons
        whole = new if heads is None else new.unflatten(1, (-1, 32))  # d_head of the tiny models
        picked = slice(None) if heads is neurons is None else list(heads or neurons)
        state, args = torch.zeros(self._given.get("state", ())), self._given.get("args")
        context = SimpleNamespace(args=args, state=state, saved={}, heads=heads, neurons=neurons)
        returned = self._function(whole[:, picked].clone(), context)
        changed, values = returned if isinstance(returned, tuple) else (returned, {})
        self.values.update(values)
        if changed is not None:
            whole[:, picked] = changed
        return new


def both(function: Callable[..., Any], given: dict[str, Any]) -> tuple[weir.Hook, Applied]:
    """A hook, and the same in the reference."""
    hook = weir.Hook(function, **given)
    return hook, Applied(function, hook, given)
