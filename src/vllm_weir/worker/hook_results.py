"""What hooks give, on its way to the readers of their requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_weir import messages
from vllm_weir.schema.hooks import Site
from vllm_weir.util.saved import Unsent


class _Sending(NamedTuple):
    """What a reader is told, whose data are on their way to the host.

    Attributes:
        data: in host memory, complete once the device has come here.
        rows: int64, which of the data's rows; None for all.
        flags: whether they are rows that are not finite now.
    """

    told: messages.Told
    data: torch.Tensor | None = None
    rows: np.ndarray | None = None
    flags: bool = False


class HookResults:
    """Values, what was saved, and which rows were spoiled, of the step that is being issued.

    Args:
        tells: whether this worker tells readers; one of a tensor-parallel group does.
        anew: whether a position may be computed anew with another token, as after a draft that is rejected.
    """

    def __init__(self, device: torch.device, tells: bool, anew: bool) -> None:
        self._device, self.tells, self._anew = device, tells, anew
        self._sending: dict[str, list[_Sending]] = {}
        """Endpoint -> what its requests are told."""

    def add_values(
        self,
        endpoint: str,
        request_id: str,
        name: str,
        site: Site,
        positions: np.ndarray,
        values: torch.Tensor,
        rows: np.ndarray | None = None,
        flags: bool = False,
    ) -> None:
        """Tell a reader of values [n, ...] at positions, or, as flags, which rows were finite and no longer are.

        `values` are float32, or bool [n] if they are `flags` of the function `name`; `rows`, int64 [n], is where they
        stand if they are in host memory together with those of others.
        """
        at, shape = positions.astype(np.int32).tobytes(), [len(positions), *values.shape[1:]]
        told = messages.Told(request_id, name, site.hook, site.layer, at, shape, spoiled=flags)
        data = on_its_way(values) if rows is None else values
        self._sending.setdefault(endpoint, []).append(_Sending(told, data, rows, flags))

    def add_saved(self, endpoint: str, request_id: str, site: Site, kept: Mapping[Any, Any], unsent: Unsent) -> None:
        """Tell a reader of what is new of what a function has saved; raise WeirError if it cannot be sent."""
        for name, first, data in unsent.take(kept):
            told = messages.Told(request_id, name, site.hook, site.layer, None, [], data, first=first)
            self._sending.setdefault(endpoint, []).append(_Sending(told))

    def take(self) -> Callable[[], dict[str, list[messages.Told]]]:
        """Return what waits for what the step's functions gave, and returns it by endpoint; forget it."""
        sending, self._sending = self._sending, {}
        copied = torch.cuda.Event() if sending and self._device.type == "cuda" else None
        if copied is not None:
            copied.record()

        def arrived() -> dict[str, list[messages.Told]]:
            if copied is not None:
                copied.synchronize()
            return {
                endpoint: [told for one in several if (told := self._arrived(one)) is not None]
                for endpoint, several in sending.items()
            }

        return arrived

    def _arrived(self, one: _Sending) -> messages.Told | None:
        """Return a message with its data; None for flags that are not set, unless they may have been."""
        if one.data is None:
            return one.told
        data = one.data if one.rows is None else one.data[torch.from_numpy(one.rows)]
        if one.flags and not self._anew and not data.any():
            return None
        one.told.data = data.numpy().tobytes()
        return one.told


def on_its_way(values: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory that is complete once the device has come here."""
    return values.contiguous().to("cpu", non_blocking=True, copy=True)
