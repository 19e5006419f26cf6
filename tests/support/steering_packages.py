"""repeng and steering-vectors, unchanged, as references.

Both pin older versions of NumPy or transformers than vLLM has, so `scripts/setup_env.py` installs them without what
they depend on.
"""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import numpy as np


def repeng() -> Any:
    """Import repeng, whose annotations name an alias that NumPy 2 has dropped."""
    with mock.patch.object(np, "float_", np.float64, create=True):
        return importlib.import_module("repeng")


def steering_vectors() -> Any:
    """Import steering-vectors."""
    return importlib.import_module("steering_vectors")
