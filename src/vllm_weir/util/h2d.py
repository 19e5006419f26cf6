"""Copies of small arrays to the device that do not wait for it."""

from __future__ import annotations

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the array as a tensor of `device`, copied asynchronously.

    The array must not change afterwards. The copy is from pinned memory: any other makes the host
    wait for all work queued on the device.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
