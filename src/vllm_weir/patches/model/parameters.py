"""Weights of vLLM's model by name, as the worker's rank holds them, and their `fingerprint`."""

from __future__ import annotations

import datetime
import difflib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from vllm_weir.errors import WeirError, brief
from vllm_weir.worker.parameters import HeldWeight, Parameters, fingerprint

PATIENCE = datetime.timedelta(seconds=60)
"""How long a rank waits for the others to ask for the same weight."""


def parameters_of(model: torch.nn.Module, config: Any) -> Parameters:
    """Return what gives the weights of a loaded model."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    ranks = group.world_size
    find = functools.partial(_find, model, ranks, config.parallel_config.pipeline_parallel_size)
    if ranks == 1:
        return Parameters(find)
    return Parameters(find, ranks, lambda part: group.all_gather(part.contiguous(), 0).chunk(ranks), _Agreement(group))


class _Agreement:
    """Tells a rank what all ranks of a group say on an occasion.

    It goes over torch's store: a collective in which a rank is missing would leave the group out of step for good.
    Whoever first has all answers, or no more patience, decides for all.
    """

    def __init__(self, group: Any) -> None:
        self._ranks, self._rank, self._count = list(group.ranks), group.rank_in_group, 0
        self._store: Any = None
        self._previous: list[str] = []

    def __call__(self, occasion: str, said: str) -> list[str]:
        store = self._store = self._store or torch.distributed.distributed_c10d._get_default_store()
        topic = f"weir {self._ranks} {self._count} {occasion}"
        answers = [f"{topic} {rank}" for rank in range(len(self._ranks))]
        store.set(answers[self._rank], said)
        try:
            store.wait(answers, PATIENCE)
            decided = store.compare_set(topic, "", "all")
        except RuntimeError:
            decided = store.compare_set(topic, "", "not all")
        if decided != b"all":
            raise WeirError("not all tensor-parallel ranks asked for it: a function has to do the same on all of them")
        found = [store.get(answer).decode() for answer in answers]
        for key in self._previous:
            store.delete_key(key)  # every rank has read it, since it has come here
        self._previous = [answers[self._rank]] + [topic] * (not self._rank)
        self._count += 1
        return found


def _find(model: Any, ranks: int, stages: int, name: str) -> HeldWeight:
    """Return a weight as this rank holds it, by vLLM's name or, of a matrix put together with others, its own.

    Raise WeirError if there is none, or only in a form that kernels read.
    """
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

    module, own, chosen = _place(model, stages, name)
    tensor = getattr(module, own)
    method = getattr(module, "quant_method", None)
    if method is not None and not isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        raise WeirError(f"{name} is in a form of its kernels ({type(method).__name__}), not a matrix of numbers")
    dropped = is_dropped(module, own, tensor)
    if dropped and (ranks > 1 or not isinstance(module, LinearBase)):
        raise WeirError(f"{name} is in a form of this processor's kernels, and cannot be put together; use a GPU")
    sizes, copies, dim = _layout(module, own, tensor, ranks)
    rows = None
    if isinstance(module, VocabParallelEmbedding):
        rows = module.org_vocab_size
        if module.num_embeddings != rows:
            raise WeirError(f"{name} has rows of added tokens, which are not in the order of the token ids")
    if dropped:
        mark = products(module, name)
        return HeldWeight(lambda: _read_dropped(module), mark, False, sizes, copies, chosen=chosen)
    return HeldWeight(lambda: tensor.data, tensor.data, True, sizes, copies, dim, rows, chosen)


def _layout(module: Any, own: str, tensor: torch.Tensor, ranks: int) -> tuple[list[int], list[int], int | None]:
    """Return `sizes`, `copies` and `dim` of a `HeldWeight`; raise WeirError if the ranks' layout is unknown."""
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    sizes = list(getattr(module, "output_partition_sizes", ()))
    if len(sizes) < 2:
        sizes = [len(tensor) if tensor.numel() else module.output_size]
    copies, kind, loader = [1] * len(sizes), type(module), getattr(tensor, "weight_loader", None)
    whole = ranks == 1 or getattr(module, "disable_tp", False) or kind is linear.ReplicatedLinear or loader is None
    if whole or (kind is linear.RowParallelLinear and own == "bias"):
        return sizes, copies, None
    vocabulary = (VocabParallelEmbedding, ParallelLMHead)
    stock = (linear.ColumnParallelLinear, linear.MergedColumnParallelLinear, linear.QKVParallelLinear)
    known = (*stock, linear.RowParallelLinear, *vocabulary)
    if kind not in known or type(getattr(loader, "__self__", None)) not in (kind, *vocabulary):
        raise WeirError(f"how tensor-parallel ranks hold the weights of this {kind.__name__} is not known")
    if kind is linear.QKVParallelLinear:
        copies[1:] = [module.num_kv_head_replicas] * 2
    return sizes, copies, 1 if kind is linear.RowParallelLinear else 0


def _place(model: Any, stages: int, name: str) -> tuple[Any, str, int | None]:
    """Return the module that has a weight, the weight's name there, and which of several matrices in it is meant."""
    from vllm.model_executor.models.utils import PPMissingLayer

    for path, chosen in _paths(model, str(name)):
        module_path, _, own = path.rpartition(".")
        try:
            module = model.get_submodule(module_path)
        except AttributeError:
            continue
        module = getattr(module, "base_layer", module)  # under LoRA
        if own in module._parameters or own in module._buffers:
            if getattr(module, own) is None:
                continue
            return module, own, chosen
        if isinstance(module, PPMissingLayer):
            break
    near = difflib.get_close_matches(str(name)[:200], _names(model), n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    if stages > 1:
        hint += (
            "; other stages of the pipeline cannot be asked in the middle of a step: hook a block of the stage that "
            "has it, give it by args, or start the engine with pipeline_parallel_size=1"
        )
    where = "this stage of the model" if stages > 1 else "the model"
    raise WeirError(f"{where} has no weight {brief(str(name), 80)!r}{hint}")


def _names(model: Any) -> list[str]:
    found = [name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())]
    for together, parts in getattr(model, "packed_modules_mapping", {}).items():
        inside = [name for name in found if f".{together}." in name]
        found += [name.replace(f".{together}.", f".{part}.") for name in inside for part in parts]
    return found


def _paths(model: Any, name: str) -> Iterator[tuple[str, int | None]]:
    """Yield where a weight may be: as named, and in the module that vLLM puts it together with others in."""
    yield name, None
    *above, part, own = name.rsplit(".", 2) if "." in name else ("", name)
    for together, parts in getattr(model, "packed_modules_mapping", {}).items():
        if part in parts and len(parts) > 1:
            yield ".".join((*above, together, own)), parts.index(part)


def _read_dropped(module: Any) -> torch.Tensor:
    """Return the matrix of a linear module whose parameter was dropped, by products with unit vectors."""
    units = torch.eye(module.input_size, dtype=module.params_dtype)  # it is on a CPU, and the only rank
    return module.quant_method.apply(module, units, None).t().contiguous()


BLOCK = 64
"""Columns of a packed matrix that are added up in one product."""


def weights_now(runner: Any) -> str | dict[str, str]:
    try:
        with torch.no_grad():
            return fingerprint(_tensors(runner.get_model()))
    except WeirError as e:
        return {"error": e.message}


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's parameters and the buffers that belong to its state, by name.

    Kernels of CPUs keep the matrices of linear modules in a form of their own, which cannot be read, and vLLM drops the
    parameter. Of such a module it yields products with vectors that between them have every column. Raises WeirError if
    weights can be read in neither way.
    """
    for prefix, module in model.named_modules():
        kept = {n: t for n, t in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for own, tensor in {**module._parameters, **kept}.items():
            name = f"{prefix}.{own}"
            if is_dropped(module, own, tensor):
                yield name, products(module, name)
            elif tensor is not None:
                yield name, tensor


def is_dropped(module: Any, own: str, tensor: torch.Tensor | None) -> bool:
    """Return whether a module's parameter, `tensor`, is empty because kernels keep it in a form of their own."""
    named = own.endswith(("weight", "weight_packed")) and hasattr(module, "quant_method")
    return named and (tensor is None or not tensor.numel())


def products(module: Any, name: str) -> torch.Tensor:
    """Return what a linear module makes of vectors with `BLOCK` columns each, and 1 to 2 in them."""
    width = getattr(module, "input_size_per_partition", getattr(module, "input_size", None))
    if width is None:
        raise WeirError(f"{name} is in a form that cannot be read, so that it cannot be told from other weights")
    column = torch.arange(width)
    vectors = torch.zeros(-(-width // BLOCK), width, dtype=module.params_dtype)
    vectors[column // BLOCK, column] = (1 + column % BLOCK / BLOCK).to(vectors.dtype)
    device = next((p.device for p in module.parameters()), vectors.device)
    return module.quant_method.apply(module, vectors.to(device), None)
