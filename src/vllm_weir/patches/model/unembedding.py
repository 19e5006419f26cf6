"""The model's own way from rows of the stream to logits, as a lens takes it, verified when the model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vllm_weir.errors import WeirError
from vllm_weir.patches.model.whole_head import HeadForm, WholeHead, find_head
from vllm_weir.schema.hooks import Site
from vllm_weir.worker.discovery.anchors import pick
from vllm_weir.worker.discovery.matcher import Matcher
from vllm_weir.worker.discovery.site_map import Link, SiteMap
from vllm_weir.worker.lenses import Unembedding
from vllm_weir.worker.model_info import ModelInfo
from vllm_weir.worker.tap.install import untapped

FAILURES = (RuntimeError, AttributeError, TypeError, ValueError, AssertionError, NotImplementedError, KeyError)
"""What code of a model that is called out of its usual order may raise."""


def unembedding_of(model: Any, sites: SiteMap, config: Any) -> Unembedding:
    """Return what a lens needs of a loaded model that one rank has in whole, or why it serves none.

    The lens of the last block has to give the logits that the model gives itself.
    """
    if why := why_none(model, sites, config):
        return refused(why)
    path = sites.output_path
    assert path is not None, "else there is a reason why"
    own_logits, logits = ways(model, path.links, path.scale, model.get_submodule)
    dtype, vocabulary = config.model_config.dtype, config.model_config.get_vocab_size()
    why = why_apart(lambda: own_logits(path.output.to(dtype)), logits, path.stream.to(dtype), dtype, vocabulary)
    return refused(why) if why else Unembedding(logits, vocabulary, "")


def why_none(model: Any, sites: SiteMap, config: Any) -> str:
    """Return why a model, or its last stage, serves no lens, as far as that is known before it is tried."""
    if config.model_config.runner_type == "pooling":
        return "the engine pools, and vLLM has removed the model's unembedding"
    if not hasattr(model, "compute_logits"):
        return "the model computes no logits"
    if sites.output_path is None:
        last = sites.refused.get(Site("resid_post", sites.num_layers - 1), "")
        why = last or sites.refused.get(Site("final_norm", 0), "it was not found")
        return f"what the model does between its last block and its logits is not known: {why}"
    return ""


def ways(
    model: Any, links: Sequence[Link], scale: float, find: Callable[[str], Any]
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """Return how a model computes logits of what it returns, and of what leaves its last block.

    `find` gives the module of a path, of those on the way.
    """
    adapted = [
        module for name, module in model.named_modules() if hasattr(module, "punica_wrapper") and not _in_a_list(name)
    ]

    def own_logits(rows: torch.Tensor) -> torch.Tensor:
        with _without_adapters(adapted):
            return model.compute_logits(rows)

    def logits(rows: torch.Tensor) -> torch.Tensor:
        with _without_adapters(adapted):
            for link in links:
                result = untapped(find(link.module))(_times(link.scale, rows))
                rows = pick(link.result, (), {}, result)
        return own_logits(_times(scale, rows))

    return own_logits, logits


def unembedding_rows(
    model: Any, model_info: ModelInfo, whole: WholeHead | None, token_ids: Sequence[int]
) -> dict[str, Any]:
    """Return what the logits of tokens are products with: ``rows``, float32 [tokens, d_model], or ``error``.

    They are read off products with unit rows, whatever form the weights have in memory. Called on all ranks alike.
    """
    try:
        if whole is None:
            row = torch.zeros(1, model_info.d_model, dtype=model_info.dtype, device=model_info.device)
            head = find_head(model, row)
            form = HeadForm.of(head, model_info.dtype, model_info.device, 1)
            whole = WholeHead(model, form, model_info.device, head, lambda part: part, None)
    except WeirError as e:
        return {"error": e.message}
    if whole.width != model_info.d_model:
        return {"error": f"the model's unembedding takes no rows of the stream's width, {model_info.d_model}"}
    return {"rows": whole.columns_of(token_ids).float().cpu().contiguous().numpy().tobytes()}


def refuse_adapter(lora_request: Any, field: str) -> None:
    """Raise WeirError, naming `field`, if a LoRA adapter changes more than blocks, or that cannot be told.

    A lens has the model's own unembedding: it reads rows of requests with different adapters together.
    """
    from vllm.lora.utils import get_adapter_absolute_path

    file = Path(get_adapter_absolute_path(lora_request.lora_path)) / "adapter_model.safetensors"
    try:
        with safe_open(file, "pt") as tensors:
            outside = next((name for name in tensors.keys() if not _in_a_list(name)), "")  # noqa: SIM118
    except (OSError, SafetensorError) as e:
        raise WeirError(
            f"whether the adapter {lora_request.lora_name!r} changes the unembedding cannot be read in {file} ({e}); "
            "store its weights there, or ask for the lens without the adapter",
            field,
        ) from None
    if outside:
        raise WeirError(
            f"the adapter {lora_request.lora_name!r} has the weights {outside}, which are in no block, and a lens has "
            "the unembedding of the model without adapters; capture 'resid_post' instead",
            field,
        )


def _in_a_list(path: str) -> bool:
    return any(part.isdigit() for part in path.split("."))


class _NoAdapter:
    """In the place of what vLLM adds the products of LoRA adapters with, by the tokens of a step: it adds nothing."""

    def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
        if not name.startswith("add_"):
            raise AttributeError(name)
        return lambda output, *_args, **_more: output


@contextmanager
def _without_adapters(modules: Sequence[Any]) -> Iterator[None]:
    """Let modules do what they do without adapters: rows of a lens are not the tokens of the step."""
    saved = [module.punica_wrapper for module in modules]
    try:
        for module in modules:
            module.punica_wrapper = _NoAdapter()
        yield
    finally:
        for module, wrapper in zip(modules, saved, strict=True):
            module.punica_wrapper = wrapper


def _times(scale: float, rows: torch.Tensor) -> torch.Tensor:
    return rows if scale == 1 else scale * rows


def why_apart(
    own_logits: Callable[[], torch.Tensor],
    logits: Callable[[torch.Tensor], torch.Tensor],
    stream: torch.Tensor,
    dtype: torch.dtype,
    vocabulary: int,
) -> str:
    """Return why the lens of the last block is not what the model computes from its output; "" if it is.

    Args:
        own_logits: returns the model's logits.
        logits: the lens.
        stream: what has left the last block. It is given in another order, which must not matter.
        vocabulary: how many tokens there are.
    """
    try:
        with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
            own = own_logits()
            lens = logits(stream.flip(0)).flip(0)
            if own.dim() != 2 or own.shape != lens.shape or own.shape[1] < vocabulary:
                shapes = f"{tuple(lens.shape)} and {tuple(own.shape)}"
                return (
                    f"the logits of the lens and of the model have shapes {shapes}, and there are {vocabulary} tokens"
                )
            finite = own.isfinite()
            if not torch.equal(finite, lens.isfinite()):
                return "the lens of the last block and the model rule out different tokens"
            # What all logits of a row share is no matter of theirs.
            own, lens = (_centred(one.double(), finite) for one in (own, lens))
    except FAILURES as e:
        return not_alone(e)
    size, apart = (float(one.square().mean().sqrt()) for one in (own, lens - own))
    if not size > 0 or not apart <= Matcher(dtype).tolerance * size:
        return (
            "with the model's own weights the lens of the last block is not what the model says itself (off by "
            f"{apart:.1e} where logits vary by {size:.1e})"
        )
    return ""


def not_alone(e: Exception) -> str:
    return f"the model's own way to its logits cannot be taken alone ({type(e).__name__}: {str(e)[:300]})"


def _centred(logits: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    """Return logits less the mean of each row's finite ones, with zeros for the others."""
    zeroed = logits.where(finite, 0.0)
    return (zeroed - zeroed.sum(1, keepdim=True) / finite.sum(1, keepdim=True)).where(finite, 0.0)


def refused(why: str) -> Unembedding:
    return Unembedding(refused=f"no lens is served: {why}")
