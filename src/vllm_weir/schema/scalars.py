"""Single numbers, in whatever a caller holds them."""

from __future__ import annotations

from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """The Python number in a tensor or array of no dimensions; anything else as it is."""
    if isinstance(value, np.generic) or getattr(value, "ndim", None) != 0 or not hasattr(value, "item"):
        return value
    try:
        number = value.item()
    except RuntimeError:  # of the device "meta": it has no value, and is refused as the tensor that it is
        return value
    return number if isinstance(number, (int, float)) else value


def is_int(value: object) -> bool:
    """Whether this is an int of Python's or numpy's; bools are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))
