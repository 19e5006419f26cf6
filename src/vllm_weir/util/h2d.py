"""Copies of small arrays to the device that wait for nothing."""

from __future__ import annotations

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the array as a tensor of `device`; the copy may still be under way, so do not change the array.

    It goes through pinned memory: from pageable memory the host would wait until the device has done all its work,
    and the device would then wait for the host.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
