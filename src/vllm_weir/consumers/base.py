"""What a consumer is: the class that plugins derive from, and what it is handed."""

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
        name: both in one (and `part`), unique among live requests: what files are called after.
        prompt_tokens, generated_tokens: how many.
        finish_reason: vLLM's, e.g. ``"stop"`` or ``"length"``.
        metadata: what `weir.mark` was given.
        part: ``"marked"`` for the marked rows of a sequence that has others for the same sink; else empty.
        capture: what its rows are where they are not simply those of all positions: entries with ``"hook"``,
            ``"layers"`` and ``"reduce"``, ``"project"`` (the number of directions), ``"before"``, ``"positions"``, as
            far as they apply.
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
        request: whose they are.
        site: where they were taken.
        positions: int64 [rows], ascending.
        token_ids: int64 [rows], the tokens at these positions; -1 where a prompt was given as embeddings.
        data: [rows, d_model] in the capture's dtype; uint8 [rows, record_bytes] if they are compressed.
        compression: header of the compression, None for plain rows.
    """

    request: Finished
    site: Site
    positions: torch.Tensor
    token_ids: torch.Tensor
    data: torch.Tensor
    compression: Mapping[str, Any] | None = None

    def decoded(self) -> torch.Tensor:
        """[rows, d_model], float32 if the rows are compressed."""
        if self.compression is None:
            return self.data
        from vllm_weir import codec

        return codec.decode(self.data, self.compression)


class Consumer:
    """Gets rows of finished requests, in a thread of its own, one request after the other.

    Derive from it and name the class in the entry-point group ``vllm_weir.consumers``. For each sequence `take` is
    called once a site, then `finish`; or `abort` instead, after whatever was raised. What a method raises is reported
    on the request's output and in the log; the engine and other requests go on.

    Attributes:
        captures: what it gets of every request of an engine that has set it up, unless the settings say otherwise; a
            consumer without captures gets what requests send to it by name.
        required: whether a request fails when this consumer fails.

    Args:
        options: from the settings or the request, plain JSON data. Raise `WeirError` for what is wrong: the request
            is refused before it runs, or the engine does not start.
    """

    captures: Sequence[Any] = ()
    required: bool = False

    def __init__(self, **options: Any) -> None:
        if options:
            from vllm_weir.errors import WeirError

            raise WeirError(f"unknown option {next(iter(options))!r}; {type(self).__name__} has none")

    def open(self, engine: EngineInfo) -> None:
        """Called once, before any rows."""

    def take(self, rows: Rows) -> None:
        """One site's rows of a sequence. The tensors may be views of shared memory: clone what is kept."""
        raise NotImplementedError

    def finish(self, request: Finished) -> Sequence[str]:
        """All rows of this sequence have been taken; returns the files that hold them now, if any."""
        return ()

    def abort(self, request: Finished) -> None:
        """The sequence's rows cannot all be taken: leave nothing of it behind."""

    def pending(self, request: Finished) -> bool:
        """Whether rows of a finished sequence are still on their way to where they can be found.

        If `tick`, `flush` or `close` raises then, the sequence's receipt says that this consumer failed, until a later
        call has brought them there.
        """
        return False

    def tick(self) -> None:
        """Called about once a second, between sequences and while none come."""

    def flush(self) -> None:
        """Make everything that was finished durable."""

    def close(self) -> None:
        """The engine is gone; nothing more comes."""
