"""How one feature responds to a row, and what it adds to it: all that an instruction in the graph needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.sae.config import ROW_NORMALISATIONS, SAEConfig, chooses_k


class FeatureResponse(NamedTuple):
    """A feature as a function of the row h alone.

    Its activation is ``p = w . h + b`` where ``p > theta``, and 0 elsewhere; one unit of it adds
    `u` to the reconstruction. So ``h + (target - activation) * u`` is the row with the feature set
    to `target` and the autoencoder's error kept.

    Attributes:
        w: float32 [d_in].
        b: bias.
        theta: threshold, 0 or more.
        u: float32 [d_out]; of a block of a cross-layer transcoder [writes, d_out].
    """

    w: np.ndarray
    b: float
    theta: float
    u: np.ndarray

    def activation(self, rows: np.ndarray) -> np.ndarray:
        """Return the activations [n] of rows [n, d_in], computed in float64."""
        p = rows.astype(np.float64) @ self.w.astype(np.float64) + self.b
        return np.where(p > self.theta, p, 0.0)


def decoder_direction(config: SAEConfig, tensors: Mapping[str, torch.Tensor], feature: int) -> np.ndarray:
    """Return what one unit of a feature adds to the reconstruction, float32 [d_out], or [writes, d_out]."""
    if not config.is_transcoder:  # whose output is not scaled back
        _refuse_row_normalisation(config)
    direction = _float64(tensors["W_dec"][feature])
    if config.rescale_acts_by_decoder_norm:
        norm = np.linalg.norm(direction)
        direction = direction / norm if norm > 0 else direction
    return _finite(direction, "W_dec", feature)


def feature_response(config: SAEConfig, tensors: Mapping[str, torch.Tensor], feature: int) -> FeatureResponse:
    """Return a feature's response; biases, gates and thresholds are folded in float64."""
    if chooses_k(config.architecture) or config.architecture == "matching_pursuit":
        kind = "TopK SAE" if chooses_k(config.architecture) else "SAE with matching pursuit"
        raise WeirError(
            f"whether a feature of a {kind} is active depends on all its other features; encode the row instead",
            "architecture",
        )
    _refuse_row_normalisation(config)
    u = decoder_direction(config, tensors, feature)
    w = _float64(tensors["W_enc"][:, feature])
    shift = float(_float64(tensors["b_dec"]) @ w) if config.apply_b_dec_to_input else 0.0
    if config.architecture == "gated":
        gain = float(np.exp(_float64(tensors["r_mag"][feature])))
        b_mag = float(_float64(tensors["b_mag"][feature]))
        # The gate opens where x . w > -b_gate, that is where gain * (x . w) + b_mag is above this.
        threshold = b_mag - gain * float(_float64(tensors["b_gate"][feature]))
        w, b = gain * w, b_mag - gain * shift
    else:
        b = float(_float64(tensors["b_enc"][feature])) - shift
        threshold = float(_float64(tensors["threshold"][feature])) if config.has_threshold else 0.0
    bias, theta = _finite(np.array([b, max(threshold, 0.0)]), "bias or threshold", feature).tolist()
    return FeatureResponse(_finite(w, "W_enc", feature), bias, theta, u)


def _refuse_row_normalisation(config: SAEConfig) -> None:
    if config.normalize_activations in ROW_NORMALISATIONS:
        raise WeirError(
            f"{config.normalize_activations} scales each row by its own length, so a feature is no fixed direction",
            "normalize_activations",
        )


def _float64(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", torch.float64).numpy()


def _finite(value: np.ndarray, name: str, feature: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        out = value.astype(np.float32)
    if not np.isfinite(out).all():
        raise WeirError(f"feature {feature} has NaN or Inf", name)
    return out
