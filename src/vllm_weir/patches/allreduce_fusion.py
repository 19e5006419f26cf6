"""Keep taps from breaking vLLM's fusion of all-reduce and norm (tensor parallelism, FlashInfer).

With taps between them, vLLM would find no all-reduce followed by a norm to fuse. So the fused op is
replaced by one that takes the taps too. If none of them acts, it runs vLLM's own kernel with the
same arguments; if one acts, it runs the all-reduce, the taps and the norm one after the other.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from vllm_weir.worker.tap import op as taps_op
from vllm_weir.worker.tap.graph_surgery import ALONE, detach, reattach

if TYPE_CHECKING:
    from vllm_weir.patches.registry import PatchStatus

logger = logging.getLogger(__name__)

_LIBRARY = torch.library.Library("weir", "FRAGMENT")
_FUSED, _TAPPED = "flashinfer_trtllm_fused_allreduce_norm", "tapped_allreduce_norm"
_FP4 = "scaled_fp4_quant"


def apply(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``AllReduceFusionPass.__call__``: run it without the taps, then put them back."""

    def wrapper(self: Any, graph: torch.fx.Graph) -> None:
        fused = getattr(torch.ops.vllm, _FUSED, None)
        if fused is None or _quantises_to_fp4(graph):
            return original(self, graph)
        detached = detach(graph, torch.ops.vllm.all_reduce.default)
        original(self, graph)
        count = reattach(graph, detached, fused.default, tapped_op(fused.default))
        logger.debug("%d of %d all-reduces with taps are fused with a norm", count, len(detached))
        return None

    return wrapper


def _quantises_to_fp4(graph: torch.fx.Graph) -> bool:
    """Return whether a norm may be fused with FP4 quantisation, which `_act` cannot do."""
    return any(_FP4 in str(part) for node in graph.nodes for part in (node.target, *node.args[:1]))


@functools.cache
def tapped_op(fused: Any) -> Any:
    """Define the op that replaces `fused`: its arguments, then the taps' numbers and kinds."""
    schema = fused._schema
    names = [argument.name for argument in schema.arguments]
    declared = str(schema).partition("(")[2].rpartition(") ->")[0]
    _LIBRARY.define(f"{_TAPPED}({declared}, *, Tensor[] taps, str kinds) -> ()")

    def run(*args: Any, taps: list[torch.Tensor], kinds: str, **kwargs: Any) -> None:
        if any(taps_op.acts(number) for number in taps):
            _act(taps, kinds, **dict(zip(names, args)), **kwargs)
        else:
            fused(*args, **kwargs)

    _LIBRARY.impl(_TAPPED, run, "CUDA")
    _LIBRARY.impl(_TAPPED, run, "CPU")
    _LIBRARY._register_fake(_TAPPED, lambda *args, **kwargs: None)
    return getattr(torch.ops.weir, _TAPPED).default


def _act(
    taps: list[torch.Tensor],
    kinds: str,
    *,
    allreduce_in: torch.Tensor,
    residual: torch.Tensor,
    rms_gamma: torch.Tensor,
    rms_eps: float,
    norm_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_factor: torch.Tensor | None = None,
    weight_bias: float = 0.0,
    **_: Any,
) -> None:
    """Do what the fused kernel does, in parts, with the taps between the all-reduce and the norm.

    With a `norm_out`, the kernel puts the norm there and the stream into `allreduce_in`; without
    one, the norm into `allreduce_in` and the stream into `residual`. `quant_out` gets the norm in FP8.
    """
    import vllm.ir
    from vllm._custom_ops import scaled_fp8_quant
    from vllm.distributed.communication_op import tensor_model_parallel_all_reduce

    hidden = tensor_model_parallel_all_reduce(allreduce_in)
    for number, kind in zip(taps, kinds, strict=True):
        if kind == ALONE:
            torch.ops.weir.tap(hidden, number)
        else:
            torch.ops.weir.tap_residual(hidden, residual, number)
    weight = rms_gamma.float() + weight_bias if weight_bias else rms_gamma
    norm, stream = vllm.ir.ops.fused_add_rms_norm(hidden, residual, weight, rms_eps)
    if norm_out is None:
        allreduce_in.copy_(norm)
        residual.copy_(stream)
    else:
        norm_out.copy_(norm)
        allreduce_in.copy_(stream)
    if quant_out is not None:
        scaled_fp8_quant(norm, scale_factor, output=quant_out)
