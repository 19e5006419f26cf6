"""`Consumer`, the base class of consumers, and the data that its methods get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_weir.schema.hooks import Site


@dataclass(frozen=True)
class EngineInfo:
    """The engine whose rows a consumer gets.

    Attributes:
        model: as it was given to vLLM.
        num_layers: decoder blocks.
        d_model: width of the residual stream.
        dtype: the model's, e.g. ``"bfloat16"``.
    """

    model: str
    num_layers: int
    d_model: int
    dtype: str


@dataclass(frozen=True)
class Finished:
    """A finished sequence.

    Attributes:
        request_id: the caller's id of the request.
        index: which of the request's `n` sequences.
        name: combines these and `part`; unique among live requests, so files are named after it.
        prompt_tokens: how many.
        generated_tokens: how many.
        finish_reason: vLLM's, e.g. ``"stop"`` or ``"length"``.
        metadata: what `weir.mark` was given.
        part: ``"marked"`` for the marked rows of a sequence that has others for the same sink; else
            empty.
        capture: describes rows that are not simply those of all positions: entries with ``"hook"``,
            ``"layers"`` and, where they apply, ``"reduce"``, ``"project"`` (the number of
            directions), ``"before"`` and ``"positions"``.
    """

    request_id: str
    index: int
    name: str
    prompt_tokens: int
    generated_tokens: int
    finish_reason: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    part: str = ""
    capture: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Rows:
    """One site's rows of a sequence.

    Attributes:
        request: the sequence.
        site: the site.
        positions: int64 [rows], ascending.
        token_ids: int64 [rows], the tokens at these positions; -1 where a prompt was given as
            embeddings.
        data: [rows, d_model] in the capture's dtype; [rows, heads, d_head] of points that have a row
            for each head, and [rows, d_mlp] and so on of others; uint8 [rows, record_bytes] if they
            are compressed.
        compression: header of the compression; None for plain rows.
    """

    request: Finished
    site: Site
    positions: torch.Tensor
    token_ids: torch.Tensor
    data: torch.Tensor
    compression: Mapping[str, Any] | None = None

    def decoded(self) -> torch.Tensor:
        """Return the rows, [rows, d_model] or of the site's shape, decoded to float32 if compressed."""
        if self.compression is None:
            return self.data
        from vllm_weir import codec

        return codec.decode(self.data, self.compression)


class Consumer:
    """The base class of consumers: plugins that get the rows of finished requests.

    Derive from it and name the class in the entry-point group ``vllm_weir.consumers``. Its methods
    are called in a thread of its own, one sequence after the other: `take` once per site, then
    `finish`; or `abort`, after anything was raised. What a method raises is reported on the
    request's output and in the log; the engine and other requests go on.

    Attributes:
        captures: what it gets of every request of an engine whose settings name it, unless these
            say otherwise; may be set by ``__init__``, but not by `open`. A consumer without captures gets
            only what requests send to it by name.
        required: whether a request fails when this consumer fails.

    Args:
        options: from the settings or the request, plain JSON data. Raise `WeirError` for a wrong
            option: the request is refused before it runs, or the engine does not start.
    """

    captures: Sequence[Any] = ()
    required: bool = False

    def __init__(self, **options: Any) -> None:
        if options:
            from vllm_weir.errors import WeirError

            raise WeirError(f"unknown option {next(iter(options))!r}; {type(self).__name__} has none")

    def open(self, engine: EngineInfo) -> None:
        """Prepare for rows; called once, before any."""

    def take(self, rows: Rows) -> None:
        """Take one site's rows of a sequence.

        The tensors may be views of shared memory: clone what is kept.
        """
        raise NotImplementedError

    def finish(self, request: Finished) -> Sequence[str]:
        """Finish a sequence whose rows have all been taken.

        Return the files that hold them, if any.
        """
        return ()

    def abort(self, request: Finished) -> None:
        """Remove what was taken of a sequence whose rows cannot all be taken."""

    def pending(self, request: Finished) -> bool:
        """Return whether rows of a finished sequence are not yet where they can be found.

        If `tick`, `flush` or `close` raises while they are not, the sequence's receipt says that
        this consumer failed, until a later call succeeds.
        """
        return False

    def tick(self) -> None:
        """Do periodic work; called about once a second, between sequences."""

    def flush(self) -> None:
        """Make everything that was finished durable."""

    def close(self) -> None:
        """Finish up: the engine is closed, and nothing more comes."""
