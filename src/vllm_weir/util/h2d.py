"""Small arrays on their way to the device, beside what it is doing."""

from __future__ import annotations

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor of `device`, which need not have got to it yet; do not change the array afterwards.

    From pinned memory: a copy from any other makes the host wait until the device has done all that it was given, and
    then the device waits for the host.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
