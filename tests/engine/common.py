"""What the engine tests share: prompts, requests, and the check of every row against transformers."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.check import expected_positions
from tests.support.measure import eventually, rel_err, rounding
from tests.support.models import make_model
from tests.support.oracle import Oracle
from tests.support.references import reference
from tests.support.steered import scheduler, tokens

BOUND = rounding()
"""On max|d| / max|reference| of rows."""
SELECTORS: list[Any] = [
    "all",
    "prompt",
    "generated",
    "last_prompt",
    "sampled",
    [0, -1, 5],
    "2:40:3",
    {"token_ids": [7, 9]},
    "-4:",
    -2,
]
INSIDE = ("attn_out", "resid_mid", "mlp_out")
LENGTHS = (64, 33, 17, 1, 2, 100, 64, 50, 8, 3)


def oracle(model_dir: Path) -> Oracle:
    return reference(model_dir)


def directory(root: Path, family: str = "llama", shape: str = "a") -> Path:
    return make_model(family, shape, root)


def changed(root: Path) -> Path:
    """The model with other weights of the same shapes."""
    target = root / "llama-changed"
    if not target.exists():
        shutil.copytree(directory(root), target)
        weights = load_file(target / "model.safetensors")
        generator = torch.Generator().manual_seed(1)
        for name, weight in weights.items():
            spread = 0.3 * weight.std() if weight.dim() > 1 else 0.1
            weights[name] = weight + spread * torch.randn(weight.shape, generator=generator)
        save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


def prompts(lengths: Sequence[int] = LENGTHS) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": tokens(n, i)} for i, n in enumerate(lengths)]


def sampling(max_tokens: int = 8, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True} | more)


def asking(selector: Any, num_layers: int, max_tokens: int = 8, **more: Any) -> tuple[Any, dict]:
    """SamplingParams that capture every resid_post, the first two resid_pre and what is inside block 1, and which
    selectors each site has."""
    import vllm_weir as weir

    capture = [weir.Capture("resid_post", positions=selector), weir.Capture("resid_pre", [0, 1], selector)]
    capture += [weir.Capture(hook, 1, selector) for hook in INSIDE]
    wanted = {("resid_post", layer): [selector] for layer in range(num_layers)}
    wanted |= {("resid_pre", layer): [selector] for layer in (0, 1)}
    wanted |= {(hook, 1): [selector] for hook in INSIDE}
    return weir.params(sampling(max_tokens, **more), capture=capture), wanted


def reached(selector: Any, P: int, G: int) -> bool:
    """Whether a selector may select something in a request: else it is refused."""
    return isinstance(selector, dict) or bool(expected_positions(selector, P, G))


def ids_of(out: Any, completion: Any = None) -> list[int]:
    return list(out.prompt_token_ids) + list((completion or out.outputs[0]).token_ids)


def verify(out: Any, wanted: Mapping[tuple[str, int], Iterable[Any]], truth: Oracle, completion: Any = None) -> float:
    """The rows of a finished sequence are those of `wanted` (site -> its selectors), each once, each right."""
    completion = completion or out.outputs[0]
    acts, ids = completion.activations, ids_of(out, completion)
    P, G = len(out.prompt_token_ids), len(completion.token_ids)
    assert {tuple(s) for s in acts.sites} == set(wanted)
    reference = truth.rows(ids[:-1], wanted)
    worst = 0.0
    for site, selectors in wanted.items():
        at = sorted({p for s in selectors for p in expected_positions(s, P, G, ids)})
        assert acts.positions_of(*site).tolist() == at, (site, list(selectors))
        assert acts.token_ids_of(*site).tolist() == [ids[p] for p in at]
        assert acts[site].shape[1:] == reference[site].shape[1:] and len(acts[site]) == len(at)
        assert completion.receipt.captured[site] == len(at)
        if at:
            worst = max(worst, rel_err(acts[site], reference[site][at]))
    assert completion.receipt.prompt_tokens == P and completion.receipt.generated_tokens == G
    assert completion.receipt.complete
    assert worst <= BOUND, f"max|d| / max|ref| = {worst:.2e}"
    return worst


def same_rows(a: Any, b: Any, bound: float = BOUND) -> None:
    """Two Activations hold the same sites, positions and (to within rounding) rows."""
    assert a.sites == b.sites
    for site in a.sites:
        assert torch.equal(a.positions_of(*site), b.positions_of(*site))
        assert a[site].shape == b[site].shape
        if len(a[site]):
            assert rel_err(a[site], b[site]) <= bound


def frontend(llm: Any) -> Any:
    return llm.llm_engine.output_processor._weir_frontend


def assert_nothing_is_held(llm):
    """Nothing of any request is left in the engine, its worker or the caller's process."""
    llm.llm_engine.step()  # a worker learns of the last finished requests with the next step
    gc.collect()
    # The thread that receives rows may be about to make a hand-out; that a tensor is gone is told by it, too.
    eventually(lambda: len(frontend(llm).store), 0, 1)
    eventually(lambda: [n for held in llm.collective_rpc("weir_usage") for n in held.values() if n], [], 1)
    assert not llm.llm_engine.output_processor.request_states
    assert not scheduler(llm).requests
    assert not llm.llm_engine.has_unfinished_requests()
