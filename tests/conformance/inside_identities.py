"""What ties the points inside a block to each other and to the model's own projections, where no reference has it.

The worker found the points in passes over noise. Here they are rows of real requests. What an identity does not hold
for by its own nature (heads that are normed, a gate after attention) is left unmeasured, not failed: an error of
`UNTIED` or more is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from tests.conformance.engine import Answer, Engine
from tests.conformance.oracle import find_blocks
from tests.support.measure import rel_err

Rows = dict[tuple[str, int], torch.Tensor]
Note = Callable[..., None]
UNTIED = 0.03
PROJECTED = {"attn_in": ("q", "k", "v"), "mlp_in": ("mlp_pre", "mlp_pre_linear", "router_logits")}
"""Point -> those that are projections of its rows."""
RETURNED = {"z": "attn_out", "mlp_post": "mlp_out"}
"""Point -> the one that is a multiple of a projection of its rows."""
ACTIVATIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    functional.silu,
    functional.gelu,
    lambda x: functional.gelu(x, approximate="tanh"),
    functional.relu,
    lambda x: functional.relu(x).square(),
)


def inside_errors(engine: Engine, answers: Sequence[Answer]) -> dict[str, float]:
    """The largest error of the identities that each point inside a block takes part in, over captured answers."""
    worst: dict[str, float] = {}

    def note(error: float, *hooks: str, certain: bool = False) -> None:
        if certain or error < UNTIED:
            for hook in hooks:
                worst[hook] = max(worst.get(hook, 0.0), error)

    captured = [answer.rows for answer in answers if answer.rows]
    for rows in captured:
        patterns(rows, note)
        neurons(rows, note)
    for first, second in pairwise(captured):
        first_tokens(first, second, note)
    engine.llm.apply_model(lambda model: _projections(model, captured, note))
    return worst


def patterns(rows: Rows, note: Note) -> None:
    """A pattern is the softmax of its scores, and attention's result is what it makes of the values."""
    for (hook, layer), pattern in rows.items():
        if hook != "pattern":
            continue
        scores, v, z = (rows.get((other, layer)) for other in ("attn_scores", "v", "z"))
        sums = pattern.sum(-1, keepdim=True)
        note(max(0.0, float(sums.max()) - 1), "pattern", certain=True)
        if scores is not None:  # a sink takes its part of every key alike
            note(rel_err(scores.softmax(-1) * sums, pattern), "pattern", "attn_scores", certain=True)
        if v is not None and z is not None and v.shape[-1] == z.shape[-1]:
            v = v.repeat_interleave(z.shape[1] // v.shape[1], 1)
            note(_apart(torch.einsum("qhk,khd->qhd", pattern, v), z), "pattern", "v", "z")


def neurons(rows: Rows, note: Note) -> None:
    """What the down projection is given is an activation, times the other half of a gated MLP."""
    for (hook, layer), post in rows.items():
        pre, linear = rows.get(("mlp_pre", layer)), rows.get(("mlp_pre_linear", layer))
        if hook == "mlp_post" and pre is not None:
            hooks = ("mlp_pre", "mlp_post") + (("mlp_pre_linear",) if linear is not None else ())
            note(min(_apart(f(pre) * (1 if linear is None else linear), post) for f in ACTIVATIONS), *hooks)


def first_tokens(first: Rows, second: Rows, note: Note) -> None:
    """Nothing is rotated at position 0: from one request to the next, all columns of a head change by one factor."""
    for (rotated, layer), here in first.items():
        if rotated not in ("q_rot", "k_rot"):
            continue
        hook = rotated[0]
        before, after = first.get((hook, layer)), second.get((hook, layer))
        if before is not None and after is not None:
            a, b = here[0] * after[0], second[rotated, layer][0] * before[0]
            note(max(_apart(x, y) for x, y in zip(a, b)), hook, rotated)


def _projections(model: torch.nn.Module, captured: Sequence[Rows], note: Note) -> None:
    """The block's linear modules, run on one point's rows, give another's columns."""
    layers = 1 + max(layer for rows in captured for _, layer in rows)
    for layer, block in enumerate(find_blocks(model, layers)):
        for linear in _linears(block):
            for rows in captured:
                for source, made in PROJECTED.items():
                    given = rows.get((source, layer))
                    for hook in made:
                        row = rows.get((hook, layer))
                        out = _run(linear, given) if given is not None and row is not None else None
                        if out is not None:
                            note(gathered(row.flatten(1), out), source, hook)
                for source, hook in RETURNED.items():
                    given, row = rows.get((source, layer)), rows.get((hook, layer))
                    out = _run(linear, given) if given is not None and row is not None else None
                    if out is not None and out.shape == row.shape:
                        note(_apart(out, row), source, hook)


def _linears(block: torch.nn.Module) -> Iterator[Any]:
    from vllm.model_executor.layers.linear import LinearBase

    return (module for module in block.modules() if isinstance(module, LinearBase))


def _run(linear: Any, rows: torch.Tensor) -> torch.Tensor | None:
    """A linear module's result for these rows, past whatever wraps its call; None if they do not fit."""
    rows = rows.flatten(1)
    if rows.shape[1] != linear.input_size:
        return None
    out = linear.quant_method.apply(linear, rows.to(linear.params_dtype).contiguous(), linear.bias)
    return out.float()


def gathered(rows: torch.Tensor, out: torch.Tensor) -> float:
    """How far the columns of `rows` are from the columns of `out` that are nearest, each used once."""
    if out.shape[1] < rows.shape[1]:
        return 1.0
    apart = torch.cdist(rows.T.contiguous(), out.T.contiguous(), p=float("inf"))
    nearest = apart.argmin(1)
    if len(nearest.unique()) < len(nearest):
        return 1.0
    return rel_err(out[:, nearest], rows)


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|d| / max|ref| of `b` and that multiple of `a` which is nearest."""
    factor = float((a * b).sum() / (a * a).sum().clamp_min(1e-30))
    return rel_err(factor * a, b)
