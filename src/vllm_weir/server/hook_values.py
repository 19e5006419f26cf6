"""What users' functions gave for rows, and saved, in an answer."""

from __future__ import annotations

import base64
import math
from typing import Any, NamedTuple

import torch

from vllm_weir.frontend.outputs.view import OutputView


class ValueForm(NamedTuple):
    """How the values of hooks come in an answer.

    Attributes:
        binary: as ``{"b64", "dtype", "shape"}`` instead of numbers.
        most: bytes that they, and what is saved, may have.
    """

    binary: bool
    most: int

    def told(self, view: OutputView) -> dict[str, Any]:
        """Return the values, and what is saved, of a finished sequence, as `values` does."""
        saved = view.saved()
        if not saved:
            return self.values(view)
        if too_large := self._too_large(sum(map(_size, saved.values()))):
            return too_large
        return {"saved": {name: _plain(value) for name, value in saved.items()}} | self.values(view)

    def values(self, view: OutputView) -> dict[str, Any]:
        """Return the values of a view by name, with their positions; waits for them. One that is not finite is null.

        If they are too large, ``values_error`` says so in their place.
        """
        found = view.values()
        if not found:
            return {}
        if too_large := self._too_large(sum(one.nbytes for one in found.values())):
            return too_large
        given = {
            name: {"positions": found.positions[name].tolist()}
            | (_packed(one) if self.binary else {"values": floats(one)})
            for name, one in found.items()
        }
        return {"values": given}

    def _too_large(self, size: int) -> dict[str, str]:
        if size <= self.most:
            return {}
        why = (
            f"{size} bytes of what hooks gave exceed the {self.most} that an answer may carry "
            "(WEIR_SERVE_INLINE_BYTES); give fewer numbers, or name fewer positions or layers"
        )
        return {"values_error": why}


NUMBERS = ValueForm(False, 8 << 20)


def floats(rows: torch.Tensor) -> list[Any]:
    """Return rows as nested lists, with null for what is not finite."""
    values = rows.float().tolist()
    return values if bool(torch.isfinite(rows).all()) else _finite(values)


def _finite(values: Any) -> Any:
    if isinstance(values, list):
        return [_finite(v) for v in values]
    return values if math.isfinite(values) else None


def _packed(tensor: torch.Tensor) -> dict[str, Any]:
    data = base64.b64encode(tensor.contiguous().numpy().tobytes()).decode("ascii")
    return {"b64": data, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _plain(value: Any) -> Any:
    """Return what was saved as JSON data: tensors packed, bytes as ``{"b64"}``, null for what is not finite."""
    if isinstance(value, torch.Tensor):
        return _packed(value)
    if isinstance(value, bytes):
        return {"b64": base64.b64encode(value).decode("ascii")}
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, (bytes, str)):
        return len(value)
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 8 + sum(map(_size, inner))
