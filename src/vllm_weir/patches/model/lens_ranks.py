"""What a lens needs of a model that several ranks have: tensor-parallel ones, and stages of a pipeline."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vllm_weir.errors import WeirError
from vllm_weir.patches.model.unembedding import FAILURES, not_alone, refused, ways, why_apart, why_none
from vllm_weir.patches.model.whole_head import Head, HeadForm, WholeHead, find_head
from vllm_weir.worker.discovery.site_map import Link, OutputPath, SiteMap
from vllm_weir.worker.lenses import Unembedding

ON_RAY = (
    "on Ray, stages of a pipeline are told of a request one after the other, and the last one has the unembedding; "
    "start the engine with distributed_executor_backend='mp', or with one stage"
)


@dataclass(frozen=True)
class _Offer:
    """What the last stage of a pipeline has for a lens, as it tells the others."""

    links: tuple[Link, ...]  # see `OutputPath`
    scale: float  # likewise
    modules: list[torch.nn.Module]  # those of `links`, and the ``LogitsProcessor``, from `_packed`
    processor: str  # path of the latter
    form: HeadForm  # of the unembedding
    stream: torch.Tensor  # rows that have left the last block, float32, on the CPU
    own: torch.Tensor | None  # the model's logits of these; None on ranks that vLLM leaves without


def unembedding_of_ranks(
    model: Any, sites: SiteMap, config: Any, device: torch.device
) -> tuple[Unembedding, WholeHead | None]:
    """Do what `unembedding_of` does for a model that several ranks have; called on all of them alike.

    Every rank computes the lens of the last block, from what the others have sent, as it will for requests.
    A stage that does not come here calls `agree`.
    """
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    stages, group = get_pp_group(), get_tp_group()
    dtype, vocabulary = config.model_config.dtype, config.model_config.get_vocab_size()
    why, offer, head = "", None, None
    if stages.is_last_rank:
        try:
            why = why_none(model, sites, config)
            if stages.world_size > 1 and config.parallel_config.distributed_executor_backend == "ray":
                why = ON_RAY
            if not why:
                head, offer = _offer(model, sites.output_path, dtype, group.world_size)
        except WeirError as e:
            why = e.message
        except FAILURES as e:
            why = not_alone(e)
    why, offer = agree(why, offer)
    if why or offer is None:
        return refused(why), None
    copies = {} if head is not None else _take_in(model, offer, device)
    find = copies.__getitem__ if head is None else model.get_submodule
    linked = [find(link.module) for link in offer.links]
    several = stages.world_size > 1
    whole = WholeHead(
        model,
        offer.form,
        device,
        head,
        (lambda part: group.all_gather(part, -1)) if group.world_size > 1 else lambda part: part,
        (lambda tensor: stages.broadcast(tensor, stages.world_size - 1)) if several else None,
        [tensor.data for one in linked for tensor in (*one.parameters(), *one.buffers())] if several else (),
    )
    _, own_way = ways(model, offer.links, offer.scale, find)

    def logits(rows: torch.Tensor) -> torch.Tensor:
        with whole.in_place():
            return own_way(rows)

    with whole.held():
        why = whole.lacking
        if offer.own is not None and not why:
            own, stream = offer.own.to(device), offer.stream.to(device, dtype)
            with _alone(group):
                why = why_apart(lambda: own, logits, stream, dtype, vocabulary)
    return (refused(why), None) if why else (Unembedding(logits, vocabulary, "", lambda: whole.lacking), whole)


def agree(why: str, offer: _Offer | None = None) -> tuple[str, _Offer | None]:
    """Return why one stage of the pipeline serves no lens, and what the last one offers; called once by each stage."""
    from vllm.distributed.parallel_state import get_pp_group

    stages = get_pp_group()
    if stages.world_size == 1:
        return why, offer
    found: list[Any] = [None] * stages.world_size
    torch.distributed.all_gather_object(found, (why, offer), group=stages.cpu_group)
    return next((told for told, _ in found if told), ""), found[-1][1]


def _offer(model: Any, path: OutputPath | None, dtype: torch.dtype, ranks: int) -> tuple[Head, _Offer]:
    """Return this rank's unembedding, and what to tell other stages; called on all ranks of the last stage alike."""
    assert path is not None, "else there is a reason why"
    head = find_head(model, path.output[:1].to(dtype))
    own_logits, _ = ways(model, (), 1.0, model.get_submodule)
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        own = own_logits(path.output.to(dtype))
    names = {module: name for name, module in model.named_modules()}
    modules = [*(model.get_submodule(link.module) for link in path.links), head.processor]
    form = HeadForm.of(head, dtype, path.output.device, ranks)
    packed, stream = _packed(modules), path.stream.float().cpu()
    return head, _Offer(
        path.links, path.scale, packed, names[head.processor], form, stream, None if own is None else own.cpu()
    )


def _take_in(model: Any, offer: _Offer, device: torch.device) -> dict[str, torch.nn.Module]:
    """Return copies of the last stage's modules by path; give the model its ``LogitsProcessor`` if it has none."""
    *linked, processor = _unpacked(offer.modules, device)
    parent, _, name = offer.processor.rpartition(".")
    owner = model.get_submodule(parent)
    if not isinstance(getattr(owner, name, None), type(processor)):
        setattr(owner, name, processor)
    return {link.module: module for link, module in zip(offer.links, linked, strict=True)}


@contextmanager
def _alone(group: Any) -> Iterator[None]:
    """Let what would wait for other ranks raise RuntimeError: they do not read the same rows at the same time."""

    def refuse(*_args: Any, **_more: Any) -> None:
        raise RuntimeError("it waits for other ranks")

    names = ("all_gather", "gather", "all_reduce", "reduce_scatter", "all_gatherv", "reduce_scatterv")
    group.__dict__.update(dict.fromkeys(names, refuse))
    try:
        yield
    finally:
        for name in names:
            del group.__dict__[name]


def _packed(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return modules for `_unpacked` on another stage; raise WeirError if they cannot travel."""
    try:
        copies = copy.deepcopy(list(modules))
        for one in copies:
            one.cpu()
            for module in one.modules():
                if (method := module.__dict__.get("_forward_method")) is not None:  # vLLM's choice, perhaps compiled
                    module.__dict__["_forward_method"] = getattr(method, "__name__", "forward_native")
        pickle.dumps(copies)  # as torch will
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as e:
        raise WeirError(f"what lies behind the last block cannot be copied to other stages ({str(e)[:200]})") from None
    return copies


def _unpacked(modules: list[torch.nn.Module], device: torch.device) -> list[torch.nn.Module]:
    """Return the modules of another rank of this engine, ready for use."""
    for one in modules:
        one.to(device)
        for module in one.modules():
            if isinstance(name := module.__dict__.get("_forward_method"), str):
                module.__dict__["_forward_method"] = getattr(module, name)
    return modules
