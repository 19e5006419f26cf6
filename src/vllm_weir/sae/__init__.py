"""Sparse autoencoders and transcoders: their files, their arithmetic, and what an instruction needs of a feature."""

from typing import TYPE_CHECKING

from vllm_weir.util.lazy import lazy_names

if TYPE_CHECKING:
    from vllm_weir.sae.activations import FeatureResponse
    from vllm_weir.sae.autoencoder import SAE
    from vllm_weir.sae.config import SAEConfig

__all__ = ["SAE", "FeatureResponse", "SAEConfig"]

__getattr__, __dir__ = lazy_names(__name__)
