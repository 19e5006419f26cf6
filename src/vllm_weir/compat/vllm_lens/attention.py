"""vllm-lens's attention patterns, computed from the queries and keys of an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_weir.errors import WeirError


def attention_patterns(
    activations: Mapping[str, Any], layer: int, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the attention pattern of one block, [heads, n, n], of a request with ``output_qk``.

    Args:
        activations: ``out.activations``, or what `decode_activations` returns.
        layer: the block.
        dtype: of the computation and the result.

    Raises:
        KeyError: if the request has not asked for ``output_qk``.
        WeirError: if it has not asked for this block.
    """
    if "qk_layers" not in activations:
        raise KeyError("these are no activations of a request with output_qk")
    layers = list(activations["qk_layers"])
    if layer not in layers:
        raise WeirError(f"block {layer} was not captured; the blocks of output_qk are {layers}", "layer")
    k = layers.index(layer)
    meta = activations["qk_meta"][k]
    if meta.get("use_alibi_sqrt"):
        raise WeirError("ALiBi as a square root is not served", "qk_meta.use_alibi_sqrt")
    left, right = meta.get("sliding_window") or (-1, -1)
    return compute_attention_weights(
        activations["attn_q"][k],
        activations["attn_k"][k],
        scale=float(meta["scale"]),
        q_start=0,
        sliding_window=(int(left), int(right)),
        logits_soft_cap=float(meta.get("logits_soft_cap") or 0.0),
        alibi_slopes=meta.get("alibi_slopes"),
        sinks=meta.get("sinks"),
        dtype=dtype,
    )


def compute_attention_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    q_start: int | None = None,
    sliding_window: tuple[int, int] = (-1, -1),
    logits_soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | Sequence[float] | None = None,
    sinks: torch.Tensor | Sequence[float] | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return attention weights [heads, queries, keys]; a query that sees nothing has zeros.

    Args:
        q: queries after rotary [queries, heads, d_head].
        k: keys after rotary [keys, key-value heads, d_head]; each serves heads / key-value heads queries' heads.
        scale: factor of the dot products.
        causal: whether a query sees no key after itself.
        q_start: position of the first query, where the first key is at 0; None: the queries are the last positions.
        sliding_window: how many keys before the query, and after it, are seen; -1: all.
        logits_soft_cap: scores become ``cap * tanh(score / cap)``; 0: they do not.
        alibi_slopes: for each head: ``slope * (key's position - query's)`` is added.
        sinks: for each head: a logit that takes part in the softmax and has no column.
        dtype: of the computation and the result.

    Raises:
        WeirError: naming the argument whose shape does not fit.
    """
    start = _checked_start(q, k, q_start)
    heads = q.shape[1]
    keys = k.to(dtype).repeat_interleave(heads // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.to(dtype), keys) * scale
    if logits_soft_cap > 0:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    queries_at = torch.arange(start, start + len(q), device=q.device)
    distances = torch.arange(len(k), device=q.device) - queries_at[:, None]
    if alibi_slopes is not None:
        scores = scores + _by_head(alibi_slopes, "alibi_slopes", scores) * distances.to(dtype)
    left, right = sliding_window
    last = max(right, 0) if causal else right
    hidden = distances > last if last >= 0 else torch.zeros_like(distances, dtype=torch.bool)
    if left >= 0:
        hidden = hidden | (distances < -left)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = _by_head(sinks, "sinks", scores).expand(heads, len(q), 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return scores.softmax(-1).masked_fill(hidden.all(-1)[:, None], 0.0)


def _checked_start(q: torch.Tensor, k: torch.Tensor, q_start: int | None) -> int:
    """Return the position of the first query; raise WeirError if the shapes do not fit."""
    if q.ndim != 3 or k.ndim != 3:
        raise WeirError(f"expected [queries, heads, d_head], got {list(q.shape)} and {list(k.shape)}", "q")
    if q.shape[2] != k.shape[2]:
        raise WeirError(f"heads of {k.shape[2]} values, where those of the queries have {q.shape[2]}", "k")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise WeirError(f"{q.shape[1]} heads of queries are not divisible by {k.shape[1]} key-value heads", "k")
    start = len(k) - len(q) if q_start is None else q_start
    if start < 0:
        raise WeirError(f"the first query is at {start}, before the first key", "q_start")
    return start


def _by_head(values: torch.Tensor | Sequence[float], name: str, scores: torch.Tensor) -> torch.Tensor:
    found = torch.as_tensor(values, dtype=scores.dtype, device=scores.device).flatten()
    if len(found) != len(scores):
        raise WeirError(f"{len(found)} values for {len(scores)} heads", name)
    return found[:, None, None]
