"""Activations in files: writing them so that nothing is lost, and reading them at any size."""

from vllm_weir.keep.batch import Batch
from vllm_weir.keep.dataset import ActivationDataset, Rows
from vllm_weir.keep.open import LAYOUTS, load, open_writer
from vllm_weir.keep.writer import Writer

__all__ = ["LAYOUTS", "ActivationDataset", "Batch", "Rows", "Writer", "load", "open_writer"]
