"""Activations in files: writing them so that nothing is lost, and reading them at any size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_weir.storage.batch import Batch
    from vllm_weir.storage.conversion import convert
    from vllm_weir.storage.dataset import ActivationDataset, DatasetRows
    from vllm_weir.storage.layouts.base import Writer
    from vllm_weir.storage.loading import LAYOUTS, load, open_writer
    from vllm_weir.storage.stats import inspect

__all__ = [
    "LAYOUTS",
    "ActivationDataset",
    "Batch",
    "DatasetRows",
    "Writer",
    "convert",
    "inspect",
    "load",
    "open_writer",
]

_HOME = {
    "LAYOUTS": "loading",
    "ActivationDataset": "dataset",
    "Batch": "batch",
    "DatasetRows": "dataset",
    "Writer": "layouts.base",
    "convert": "conversion",
    "inspect": "stats",
    "load": "loading",
    "open_writer": "loading",
}


def __getattr__(name: str) -> Any:
    # The command line imports this package; torch and pyarrow are imported only when they are used.
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
