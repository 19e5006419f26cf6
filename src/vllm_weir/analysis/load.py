"""What Vllm_mi_patch's module ``analysis.load`` has, for programs that import from there."""

from vllm_weir.analysis.files import (
    load_activation_file,
    load_activation_manifest,
    load_sequence_activations,
    reconstruct_activations,
)
from vllm_weir.analysis.loader import ActivationLoader, quick_load
from vllm_weir.analysis.metrics import compare_tokens

__all__ = [
    "ActivationLoader",
    "compare_tokens",
    "load_activation_file",
    "load_activation_manifest",
    "load_sequence_activations",
    "quick_load",
    "reconstruct_activations",
]
