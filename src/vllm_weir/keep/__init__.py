"""Activations in files: writing them so that nothing is lost, and reading them at any size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_weir.keep.batch import Batch
    from vllm_weir.keep.copying import convert
    from vllm_weir.keep.dataset import ActivationDataset, Rows
    from vllm_weir.keep.figures import inspect
    from vllm_weir.keep.open import LAYOUTS, load, open_writer
    from vllm_weir.keep.writer import Writer

__all__ = ["LAYOUTS", "ActivationDataset", "Batch", "Rows", "Writer", "convert", "inspect", "load", "open_writer"]

_HOME = {
    "Batch": "batch", "convert": "copying", "ActivationDataset": "dataset", "Rows": "dataset", "inspect": "figures",
    "LAYOUTS": "open", "load": "open", "open_writer": "open", "Writer": "writer",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    # The command line imports this package; torch and pyarrow are imported only when they are used.
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
