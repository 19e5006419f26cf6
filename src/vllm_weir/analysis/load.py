"""The names of Vllm_mi_patch's module ``analysis.load``, for programs that import from there."""

from vllm_weir.analysis.loader import (
    ActivationLoader,
    load_activation_file,
    load_activation_manifest,
    load_sequence_activations,
    quick_load,
)
from vllm_weir.analysis.metrics import compare_tokens
from vllm_weir.analysis.reconstruct import reconstruct_activations

__all__ = [
    "ActivationLoader",
    "compare_tokens",
    "load_activation_file",
    "load_activation_manifest",
    "load_sequence_activations",
    "quick_load",
    "reconstruct_activations",
]
