"""`AsyncController`, the base class of controllers that change what later requests undergo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from vllm_weir.consumers.base import Consumer, Finished, Rows
from vllm_weir.results.scores import Scores


class Actions(Protocol):
    """What a controller can change for requests that are admitted from then on.

    Requests under way keep what they were admitted with. Keys of the prefix cache follow from the
    content of vectors, so KV of before and after a change never mixes. On a server, a change holds
    for all of its API-server processes.
    """

    def set_vector(self, name: str, vector: Any) -> str:
        """Register a vector under a name, replacing any other, and return its digest.

        As `weir.register` does: requests that name it use the new one. An intervention that was
        given to `set_global` keeps the vector that its name stood for then.

        Raises:
            WeirError: if this is not a vector.
        """

    def remove_vector(self, name: str) -> None:
        """Forget a registered vector; raise WeirError if there is none of the name."""

    def set_global(self, interventions: Any) -> None:
        """Apply interventions to every request, in place of earlier global ones, as `weir.set_global`.

        Raises:
            WeirError: naming the field that is wrong; then nothing changes.
        """

    def clear_global(self) -> None:
        """Remove the interventions of every request."""


class AsyncController(Consumer):
    """The base class of controllers that act between requests.

    A consumer with scores and with `actions`: once a sequence has finished, `score` is called, then
    `take` for each site of its `captures`, then `finish`; or `abort`, after anything was raised. All
    calls come from one thread of its own in the caller's process, one sequence after the other, in
    the order in which the sequences finished.

    Attributes:
        probes: probes that score every request of the engine, registered under their names; may be
            set by ``__init__``. Without any it gets the sequences that other probes have scored.
        captures: captures of every request, whose rows `take` gets; may be set by ``__init__``.
        required: whether a request fails when this controller fails at it.
        actions: changes what later requests undergo; there from `open` on.
    """

    probes: Sequence[Any] = ()
    actions: Actions

    def score(self, request: Finished, scores: Scores) -> None:
        """Take the scores of a finished sequence: by the probe's name, float32 [rows, k]."""
        raise NotImplementedError

    def take(self, rows: Rows) -> None:
        """Take one site's rows of a sequence, if there are `captures`."""
