"""What hooks give, on its way to the readers of their requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_weir import messages
from vllm_weir.schema.hooks import Site
from vllm_weir.util.saved import Unsent


class Part(NamedTuple):
    """The rows of one request in a call: its id, the key of its function, and which rows, int64 [k]."""

    request_id: str
    key: str
    rows: np.ndarray


class _Sending(NamedTuple):
    """What a function gave for rows of several requests, on its way to the host."""

    parts: Sequence[Part]
    endpoints: Sequence[str]  # of the readers, one for each part
    name: str
    site: Site
    positions: np.ndarray  # int64 [n]
    data: torch.Tensor  # [n, ...] in host memory, complete once the device has come here
    flags: bool  # whether the data are bool [n], which rows were finite and no longer are


class HookResults:
    """Values, what was saved, and which rows were spoiled, of the step that is being issued.

    Args:
        tells: whether this worker tells readers; one of a tensor-parallel group does.
        anew: whether a position may be computed anew with another token, as after a draft that is rejected.
    """

    def __init__(self, device: torch.device, tells: bool, anew: bool) -> None:
        self._device, self.tells, self._anew = device, tells, anew
        self._sending: list[_Sending] = []
        self._saved: dict[str, list[messages.Told]] = {}
        """Endpoint -> what its requests have saved."""

    def add(
        self,
        parts: Sequence[Part],
        endpoints: Sequence[str],
        name: str,
        site: Site,
        positions: np.ndarray,
        data: torch.Tensor,
        flags: bool = False,
    ) -> None:
        """Tell the readers of requests of values [n, ...] at positions, each of the rows of its part.

        `data` are float32, or bool [n] if they are `flags` of the function `name`: which rows were finite and no
        longer are.
        """
        self._sending.append(_Sending(parts, endpoints, name, site, positions.copy(), on_its_way(data), flags))

    def add_saved(self, endpoint: str, request_id: str, site: Site, kept: Mapping[Any, Any], unsent: Unsent) -> None:
        """Tell a reader of what is new of what a function has saved; raise WeirError if it cannot be sent."""
        for name, first, data in unsent.take(kept):
            told = messages.Told(request_id, name, site.hook, site.layer, None, [], data, first=first)
            self._saved.setdefault(endpoint, []).append(told)

    def take(self) -> Callable[[], dict[str, list[messages.Told]]]:
        """Return what waits for what the step's functions gave, and returns it by endpoint; forget it."""
        (sending, self._sending), (told, self._saved) = (self._sending, []), (self._saved, {})
        copied = torch.cuda.Event() if sending and self._device.type == "cuda" else None
        if copied is not None:
            copied.record()

        def arrived() -> dict[str, list[messages.Told]]:
            if copied is not None:
                copied.synchronize()
            for one in sending:
                for endpoint, message in self._messages(one):
                    told.setdefault(endpoint, []).append(message)
            return told

        return arrived

    def _messages(self, one: _Sending) -> Iterator[tuple[str, messages.Told]]:
        """Yield endpoints and messages; none for flags that are not set, unless they may have been."""
        data = one.data.numpy()
        unset = one.flags and not self._anew
        if unset and not data.any():
            return
        for part, endpoint in zip(one.parts, one.endpoints, strict=True):
            own = data[part.rows]
            if unset and not own.any():
                continue
            at, shape = one.positions[part.rows].astype(np.int32).tobytes(), list(own.shape)
            of_site = one.name, one.site.hook, one.site.layer
            yield endpoint, messages.Told(part.request_id, *of_site, at, shape, own.tobytes(), one.flags)


def on_its_way(values: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory that is complete once the device has come here."""
    return values.contiguous().to("cpu", non_blocking=True, copy=True)
