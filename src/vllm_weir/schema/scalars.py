"""Numbers of Python, numpy and torch."""

from __future__ import annotations

from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Return the Python number in a tensor or array of no dimensions; anything else as it is."""
    if isinstance(value, np.generic) or getattr(value, "ndim", None) != 0 or not hasattr(value, "item"):
        return value
    try:
        number = value.item()
    except RuntimeError:  # on the device "meta" it has no value; the caller refuses the tensor
        return value
    return number if isinstance(number, (int, float)) else value


def is_int(value: object) -> bool:
    """Return whether a value is an int of Python or numpy; a bool is not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))
