"""Copies of small arrays to the device that wait for nothing."""

from __future__ import annotations

import numpy as np
import torch

NO_MEMORY = (
    "the device has no memory left for what the request needs there; send it again once other requests have ended, or "
    "start the engine with a lower gpu_memory_utilization"
)
"""Why a request fails that runs out of memory."""


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the array as a tensor of `device`; the copy may still be under way, so do not change the array.

    It goes through pinned memory: from pageable memory the host would wait until the device has done all its work,
    and the device would then wait for the host.

    Raises:
        torch.OutOfMemoryError: if there is no room on the device, or no memory can be pinned.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    try:
        return tensor.pin_memory().to(device, non_blocking=True)
    except RuntimeError as e:
        if is_out_of_memory(e):  # pinned memory that is missing is no OutOfMemoryError
            raise torch.OutOfMemoryError(str(e)) from e
        raise


def is_out_of_memory(e: RuntimeError) -> bool:
    """Return whether an error of torch's says that there is no memory, on the device or to be pinned."""
    return isinstance(e, torch.OutOfMemoryError) or "out of memory" in str(e)
