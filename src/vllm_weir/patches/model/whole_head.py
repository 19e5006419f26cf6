"""The unembedding in whole, on ranks that have a part of it, and on stages of a pipeline that have none.

A rank reads rows whenever they are there, without the others. So while requests with a lens are live, each rank that
sends rows has the whole unembedding; when the last of them leaves, it is freed. Stages before the last also have copies
of the modules between the last block and the unembedding, which are small (a norm).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vllm_weir.errors import WeirError

UNIT_ROWS = 64
"""Products with so many unit rows are taken at once: each has as many numbers as the vocabulary."""
NOT_HERE = (
    "this rank has no whole unembedding: it was not told of the request before the step; start the engine with "
    "distributed_executor_backend='mp'"
)


class _Given(Exception):
    """Raised where a model is about to take products with its unembedding."""


@dataclass(frozen=True)
class Head:
    """A model's unembedding, as the model hands it to vLLM's ``LogitsProcessor``."""

    module: Any  # has the weights
    bias: torch.Tensor | None  # of the tokens of this rank; None for none
    processor: Any  # takes the products

    def products(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [n, width] times this rank's part of the weights, [n, tokens], in whatever form they are."""
        return self.module.quant_method.apply(self.module, rows, None)


def find_head(model: Any, row: torch.Tensor) -> Head:
    """Return the unembedding that a model computes logits of `row` [1, width] with; raise WeirError if it has none."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    def stop(module: Any, args: tuple, kwargs: dict) -> None:
        given = dict(zip(("lm_head", "hidden_states", "embedding_bias"), args), **kwargs)
        raise _Given(given["lm_head"], given.get("embedding_bias"), module)

    processors = [one for one in model.modules() if isinstance(one, LogitsProcessor)]
    handles = [one.register_forward_pre_hook(stop, with_kwargs=True) for one in processors]
    try:
        with torch.inference_mode():
            model.compute_logits(row)
    except _Given as e:
        head, bias, processor = e.args
        return Head(getattr(head, "base_layer", head), bias, processor)
    except (RuntimeError, KeyError) as e:
        raise WeirError(f"the unembedding is not found: {str(e)[:200]}") from None
    finally:
        for handle in handles:
            handle.remove()
    raise WeirError("the unembedding is not found: the model's logits pass no LogitsProcessor of vLLM")


@dataclass(frozen=True)
class HeadForm:
    """What all ranks need to know of the unembedding."""

    width: int  # of the rows that it takes
    columns: int  # products of a row on all ranks, with padding
    dtype: torch.dtype  # of the weights
    products_dtype: torch.dtype  # in which products are taken
    biased: bool  # whether a bias is added

    @classmethod
    def of(cls, head: Head, dtype: torch.dtype, device: torch.device, ranks: int) -> HeadForm:
        """Return the form of an unembedding of which each of `ranks` ranks has a part."""
        width = head.module.embedding_dim
        with torch.inference_mode():
            one = head.products(torch.zeros(1, width, dtype=dtype, device=device))
        products_dtype = getattr(head.processor, "head_dtype", None) or one.dtype
        return cls(width, ranks * one.shape[1], one.dtype, products_dtype, head.bias is not None)


class WholeHead:
    """Has the whole unembedding of a model while there are users of it.

    Args:
        model: this rank's part of it.
        form: of the unembedding.
        head: of this rank; None on a stage that has none.
        gather: a rank's products [n, tokens] -> those of all ranks, side by side; called on all of them alike.
        broadcast: fills a tensor with that of the last stage, in all stages alike; None if there is one stage.
        copies: tensors of which this stage has copies, and the last one the originals.

    Attributes:
        keeps: whether this rank reads rows; else it only gives its part to the others.
        lacking: why this rank cannot read rows now; "" if it can.
        width: of the rows that the unembedding takes.
    """

    def __init__(
        self,
        model: Any,
        form: HeadForm,
        device: torch.device,
        head: Head | None,
        gather: Callable[[torch.Tensor], torch.Tensor],
        broadcast: Callable[[torch.Tensor], Any] | None,
        copies: Sequence[torch.Tensor] = (),
    ) -> None:
        self._model, self._form, self._device, self._head = model, form, device, head
        self._gather, self._broadcast, self._copies = gather, broadcast, copies
        self._users: set[str] = set()
        self._renewed = False
        self._weight: torch.Tensor | None = None
        self.keeps, self.lacking, self.width = True, NOT_HERE, form.width

    def follow(self, joining: Iterable[str], leaving: Iterable[str]) -> None:
        """Note which requests with a lens join, and which requests leave; alike on all ranks, before each step."""
        had = bool(self._users)
        self._users.difference_update(leaving)
        self._users.update(joining)
        if not self._users:
            self._drop()
        elif not had or self._renewed:
            self._fetch()
        self._renewed = False

    def renew(self) -> None:
        """Note that the weights may have been replaced: they are fetched again before the next step, if they are used.

        To be called on all ranks alike, between two steps.
        """
        self._renewed = True

    @property
    def nbytes(self) -> int:
        """Bytes of the whole unembedding in this rank's memory; 0 while there are no users."""
        return 0 if self._weight is None else self._weight.nbytes

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have it for a while, outside of all requests; alike on all ranks."""
        self._fetch()
        try:
            yield
        finally:
            self._drop()

    def _drop(self) -> None:
        self._weight, self.lacking = None, NOT_HERE

    @torch.inference_mode()
    def _fetch(self) -> None:
        form, weight = self._form, None
        rows = form.width + form.biased
        self.lacking = NOT_HERE
        if self.keeps:
            try:
                weight = torch.empty(rows, form.columns, dtype=form.dtype, device=self._device)
                self.lacking = ""
            except torch.OutOfMemoryError:
                # The other ranks count on this one's part all the same.
                self.lacking = (
                    f"the device has no room for the {rows * form.columns * form.dtype.itemsize} bytes of the whole "
                    "unembedding, which a lens needs on each rank; start the engine with a lower gpu_memory_utilization"
                )
        for first in range(0, rows, UNIT_ROWS):
            some = self._some(first, min(first + UNIT_ROWS, rows))
            if weight is not None:
                weight[first : first + len(some)] = some
        if self._broadcast is not None:
            for tensor in self._copies:
                self._broadcast(tensor)
        self._weight = weight

    def _some(self, first: int, end: int) -> torch.Tensor:
        """Return rows of the transposed weights, [n, columns]; the row behind the last one is the bias."""
        form = self._form
        if self._head is None:
            found = torch.empty(end - first, form.columns, dtype=form.dtype, device=self._device)
        else:
            numbers = torch.arange(first, end, device=self._device)[:, None]
            unit = (numbers == torch.arange(form.width, device=self._device)).to(form.dtype)
            products = self._head.products(unit)
            if self._head.bias is not None and end > form.width:
                products[-1] = self._head.bias
            found = self._gather(products).contiguous()
        if self._broadcast is not None:
            self._broadcast(found)
        return found

    def columns_of(self, token_ids: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor(token_ids, device=self._device)
        with torch.inference_mode():
            spans = ((first, min(first + UNIT_ROWS, self.width)) for first in range(0, self.width, UNIT_ROWS))
            return torch.cat([self._some(*span)[:, ids] for span in spans]).T

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model's own computation of logits take products with the whole unembedding."""
        changed = [module for module in self._model.modules() if hasattr(type(module), "_get_logits")]
        for module in changed:
            module.__dict__["_get_logits"] = functools.partial(self._products, module)
        try:
            yield
        finally:
            for module in changed:
                del module.__dict__["_get_logits"]

    def _products(self, module: Any, rows: torch.Tensor, *_head: Any, **_more: Any) -> torch.Tensor:
        weight, form = self._weight, self._form
        assert weight is not None, self.lacking
        if rows.is_cuda:
            # The last request may leave, and the weights be freed, before the device has used them.
            weight.record_stream(torch.cuda.current_stream())
        found = rows.to(form.products_dtype) @ weight[: form.width].to(form.products_dtype)
        if form.biased:
            found += weight[form.width].to(found.dtype)
        return found[..., : module.org_vocab_size]
