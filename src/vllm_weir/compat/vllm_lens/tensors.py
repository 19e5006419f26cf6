"""vllm-lens's tensors on the wire, and its patterns of attention."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import zstandard

from vllm_weir.errors import WeirError

JSON_KEY = "__json__"
"""Marks an entry of ``activations`` that is no tensor."""
_DTYPES = ("float32", "float16", "float64", "bfloat16")


def serialize_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """Return a tensor as JSON data, with the keys data (base64 of zstd), dtype, original_dtype, shape, compression."""
    data, described = zstd_frame(tensor)
    return {"data": base64.b64encode(data).decode("ascii"), **described}


def zstd_frame(tensor: torch.Tensor) -> tuple[bytes, dict[str, Any]]:
    """Return a tensor's values as one zstd frame (C order), and the keys of JSON data that describe it."""
    tensor = tensor.detach().cpu().contiguous()
    array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    # Threads must not share a compressor.
    data = zstandard.ZstdCompressor(level=1).compress(array.tobytes())
    return data, {
        "dtype": str(array.dtype),
        "original_dtype": str(tensor.dtype),
        "shape": list(array.shape),
        "compression": "zstd",
    }


def deserialize_tensor(d: Mapping[str, Any]) -> torch.Tensor:
    """Return the tensor of `serialize_tensor`, or of vllm-lens's function of that name, in its original dtype.

    Raises:
        WeirError: if it is damaged.
    """
    try:
        raw = base64.b64decode(d["data"], validate=True)
    except (KeyError, TypeError, AttributeError, binascii.Error) as e:
        raise _damaged(e) from None
    return _tensor_of(raw, d)


def _tensor_of(raw: bytes, d: Mapping[str, Any]) -> torch.Tensor:
    """Return the tensor whose values `raw` holds, as `d` describes it; raise WeirError if it is damaged."""
    try:
        original = str(d.get("original_dtype") or d["dtype"]).removeprefix("torch.")
        shape = tuple(map(int, d["shape"]))
        stored = np.dtype(d["dtype"])
        size = int(np.prod(shape, dtype=object)) * stored.itemsize
        if d.get("compression") == "zstd":
            if zstandard.frame_content_size(raw) != size:  # before it is unpacked
                raise ValueError(f"not {size} bytes")
            raw = zstandard.ZstdDecompressor().decompress(raw)
        if original not in _DTYPES or len(raw) != size or min(shape, default=0) < 0:
            raise ValueError(f"{len(raw)} bytes of {stored} are not {original} {list(shape)}")
        tensor = torch.from_numpy(np.frombuffer(bytearray(raw), stored).reshape(shape))
    except (KeyError, TypeError, ValueError, AttributeError, zstandard.ZstdError) as e:
        raise _damaged(e) from None
    dtype = getattr(torch, original)
    return tensor.view(dtype) if stored == np.int16 and original == "bfloat16" else tensor.to(dtype)


def _damaged(why: Exception) -> WeirError:
    return WeirError(f"not a tensor of vllm-lens: {type(why).__name__}: {str(why)[:80]}", "activations")


def serialize_activations(tensor_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors by name as JSON data, see `serialize_tensor`; what is no tensor as ``{"__json__": value}``."""
    return {
        name: serialize_tensor(one) if isinstance(one, torch.Tensor) else {JSON_KEY: one}
        for name, one in tensor_dict.items()
    }


def decode_activations(
    response_json: Mapping[str, Any], *, fetch_bytes: Callable[[str], bytes] | None = None
) -> dict[str, Any]:
    """Return what a response's field ``activations`` holds; empty if the response has none.

    That is ``residual_stream`` [layers, rows, d_model], and for ``output_qk`` ``attn_q`` [layers, rows, heads,
    d_head], ``attn_k`` [layers, rows, key-value heads, d_head], and the lists ``qk_layers`` and ``qk_meta``.

    Args:
        response_json: the response.
        fetch_bytes: returns the body of ``GET /v1/activations/{handle}``, for a request with
            ``activations_transport="binary"``.

    Raises:
        WeirError: if an entry is damaged, or has to be fetched and there is no `fetch_bytes`.
    """
    entries = response_json.get("activations") or {}
    return {name: _decoded(name, one, fetch_bytes) for name, one in entries.items()}


def _decoded(name: str, entry: Mapping[str, Any], fetch_bytes: Callable[[str], bytes] | None) -> Any:
    if JSON_KEY in entry:
        return entry[JSON_KEY]
    if "handle" not in entry:
        return deserialize_tensor(entry)
    if fetch_bytes is None:
        raise WeirError(
            f"{name} came by binary transport, to be fetched from /v1/activations/{entry['handle']}; give a function "
            "of the handle that does",
            "fetch_bytes",
        )
    return _tensor_of(fetch_bytes(entry["handle"]), entry)


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
