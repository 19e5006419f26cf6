"""Activations in files: writing them so that nothing is lost, and reading them at any size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_weir.util.lazy import lazy_names

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

# The command line imports this package; torch and pyarrow are imported only when they are used.
__getattr__, __dir__ = lazy_names(__name__)
