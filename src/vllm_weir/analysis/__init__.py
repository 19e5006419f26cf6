"""Analysis of stored activations: plots, pages on features, and Vllm_mi_patch's functions for all formats."""

from typing import TYPE_CHECKING

from vllm_weir.analysis.loader import (
    ActivationLoader,
    load_activation_file,
    load_activation_manifest,
    load_sequence_activations,
    quick_load,
)
from vllm_weir.analysis.metrics import (
    compare_tokens,
    compute_layer_statistics,
    compute_similarity,
    create_token_timeline,
    similarity_matrix,
)
from vllm_weir.analysis.part_plots import plot_attention, plot_top_neurons
from vllm_weir.analysis.plots import plot_heat_map, plot_norms, plot_similarity, plot_timeline
from vllm_weir.analysis.reconstruct import reconstruct_activations
from vllm_weir.util.lazy import lazy_names

if TYPE_CHECKING:
    from vllm_weir.analysis.feature_report.report import sae_report

__all__ = [
    "ActivationLoader",
    "compare_tokens",
    "compute_layer_statistics",
    "compute_similarity",
    "create_token_timeline",
    "load_activation_file",
    "load_activation_manifest",
    "load_sequence_activations",
    "plot_attention",
    "plot_heat_map",
    "plot_norms",
    "plot_similarity",
    "plot_timeline",
    "plot_top_neurons",
    "quick_load",
    "reconstruct_activations",
    "sae_report",
    "similarity_matrix",
]

# It needs pyarrow, which the rest does not.
__getattr__, __dir__ = lazy_names(__name__)
