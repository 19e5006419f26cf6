"""What Weir adds to vLLM's outputs: ``.activations`` and ``.receipt``. Standard library only.

Importing `vllm_weir` is enough to have them, in any process: outputs are pickled and looked at where no engine runs.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from vllm_weir.guard.import_hook import when_imported

VIEW = "_weir_view"
"""Attribute of a ``CompletionOutput``: what `vllm_weir.frontend.outputs.view` has of it."""
_PARTS = {
    "activations": "Rows captured for this sequence (index 0's for a request), or None; see `weir.Activations`.",
    "receipt": "What Weir did for this sequence (index 0's for a request), or None; see `weir.Receipt`.",
}


def give_outputs_properties() -> None:
    """Have them as soon as vLLM's outputs are imported."""
    when_imported("vllm.outputs", _give)


def _give(outputs: ModuleType) -> None:
    for part, text in _PARTS.items():
        setattr(outputs.CompletionOutput, part, property(_completion_part(part), doc=text))
        setattr(outputs.RequestOutput, part, property(_request_part(part), doc=text))


def _completion_part(part: str) -> Any:
    def get(self: Any) -> Any:
        view = getattr(self, VIEW, None)
        if view is None or (part == "activations" and not view.asked):
            return None
        return getattr(view, part)()

    return get


def _request_part(part: str) -> Any:
    def get(self: Any) -> Any:
        first = min(self.outputs, key=lambda o: o.index, default=None)
        return None if first is None else getattr(first, part)

    return get
