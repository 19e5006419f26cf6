"""The model's own way from rows of the stream to logits, as a lens takes it, verified when the model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vllm_weir.errors import WeirError
from vllm_weir.schema.hooks import Site
from vllm_weir.worker.discovery.anchors import pick
from vllm_weir.worker.discovery.matcher import Matcher
from vllm_weir.worker.discovery.output_path import OutputPath
from vllm_weir.worker.discovery.site_map import SiteMap
from vllm_weir.worker.lenses import Unembedding
from vllm_weir.worker.model_info import ModelInfo
from vllm_weir.worker.tap.install import untapped

UNIT_ROWS = 256
"""Products with so many unit rows are taken at once: each has as many numbers as the vocabulary."""


def unembedding_of(model: Any, sites: SiteMap, config: Any) -> Unembedding:
    """Return what a lens needs of a loaded model, or why it serves none.

    The lens of the last block has to give the logits that the model gives itself.
    """
    parallel, vocabulary = config.parallel_config, config.model_config.get_vocab_size()
    if parallel.pipeline_parallel_size > 1:
        return _refused("only the last pipeline stage has the unembedding; start the engine with one stage")
    if parallel.tensor_parallel_size > 1:
        return _refused(
            "tensor-parallel workers hold the unembedding in parts; start the engine with tensor_parallel_size=1"
        )
    if config.model_config.runner_type == "pooling":
        return _refused("the engine pools, and vLLM has removed the model's unembedding")
    if not hasattr(model, "compute_logits"):
        return _refused("the model computes no logits")
    path = sites.output_path
    if path is None:
        last = sites.refused.get(Site("resid_post", sites.num_layers - 1), "")
        why = last or sites.refused.get(Site("final_norm", 0), "it was not found")
        return _refused(f"what the model does between its last block and its logits is not known: {why}")

    adapted = [
        module for name, module in model.named_modules() if hasattr(module, "punica_wrapper") and not _in_a_list(name)
    ]

    def own_logits(rows: torch.Tensor) -> torch.Tensor:
        with _without_adapters(adapted):
            return model.compute_logits(rows)

    def logits(rows: torch.Tensor) -> torch.Tensor:
        with _without_adapters(adapted):
            for link in path.links:
                result = untapped(model.get_submodule(link.module))(_times(link.scale, rows))
                rows = pick(link.result, (), {}, result)
        return own_logits(_times(path.scale, rows))

    why = _why_apart(own_logits, logits, path, config.model_config.dtype, vocabulary)
    return _refused(why) if why else Unembedding(logits, vocabulary, "")


def unembedding_rows(model: Any, model_info: ModelInfo, token_ids: Sequence[int]) -> dict[str, Any]:
    """Return what the logits of tokens are products with: ``rows``, float32 [tokens, d_model], or ``error``.

    They are read off products with unit rows, whatever form the weights have in memory.
    """
    try:
        head = _head_of(model, model_info)
    except WeirError as e:
        return {"error": e.message}
    ids = torch.tensor(token_ids, device=model_info.device)
    with torch.inference_mode():
        unit = torch.eye(model_info.d_model, dtype=model_info.dtype, device=model_info.device)
        products = [head.quant_method.apply(head, some)[:, ids] for some in unit.split(UNIT_ROWS)]
    return {"rows": torch.cat(products).T.float().cpu().contiguous().numpy().tobytes()}


class _Given(Exception):
    """Raised where a model is about to take products with its unembedding."""


def _head_of(model: Any, model_info: ModelInfo) -> Any:
    """Return the module that has the unembedding; raise WeirError if it does not take rows of the stream's width."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    def stop(_module: Any, args: tuple, kwargs: dict) -> None:
        raise _Given(args[0] if args else kwargs["lm_head"])

    processors = [one for one in model.modules() if isinstance(one, LogitsProcessor)]
    handles = [one.register_forward_pre_hook(stop, with_kwargs=True) for one in processors]
    row = torch.zeros(1, model_info.d_model, dtype=model_info.dtype, device=model_info.device)
    try:
        with torch.inference_mode():
            model.compute_logits(row)
    except _Given as e:
        head = getattr(e.args[0], "base_layer", e.args[0])
        if head.embedding_dim == model_info.d_model:
            return head
    except RuntimeError as e:
        raise WeirError(f"the unembedding is not found: {str(e)[:200]}") from None
    finally:
        for handle in handles:
            handle.remove()
    raise WeirError(f"the model's unembedding takes no rows of the stream's width, {model_info.d_model}")


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


def _why_apart(
    own_logits: Callable[[torch.Tensor], torch.Tensor],
    logits: Callable[[torch.Tensor], torch.Tensor],
    path: OutputPath,
    dtype: torch.dtype,
    vocabulary: int,
) -> str:
    """Return why the lens of the last block is not what the model computes from its output; "" if it is.

    The rows are given in another order, which must not matter.
    """
    try:
        with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
            own = own_logits(path.output.to(dtype))
            lens = logits(path.stream.to(dtype).flip(0)).flip(0)
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
    except (RuntimeError, AttributeError, TypeError, ValueError, AssertionError, NotImplementedError, KeyError) as e:
        return f"the model's own way to its logits cannot be taken alone ({type(e).__name__}: {str(e)[:300]})"
    size, apart = (float(one.square().mean().sqrt()) for one in (own, lens - own))
    if not size > 0 or not apart <= Matcher(dtype).tolerance * size:
        return (
            "with the model's own weights the lens of the last block is not what the model says itself (off by "
            f"{apart:.1e} where logits vary by {size:.1e})"
        )
    return ""


def _centred(logits: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    """Return logits less the mean of each row's finite ones, with zeros for the others."""
    zeroed = logits.where(finite, 0.0)
    return (zeroed - zeroed.sum(1, keepdim=True) / finite.sum(1, keepdim=True)).where(finite, 0.0)


def _refused(why: str) -> Unembedding:
    return Unembedding(refused=f"no lens is served: {why}")
