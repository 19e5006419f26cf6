"""The arithmetic of autoencoders, as SAELens defines it, in float32; and one feature as an instruction needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.sae.config import ROW_NORMALISATIONS, SAEConfig, chooses_k
from vllm_weir.util.top import Rectifier, top_values

Tensors = Mapping[str, torch.Tensor]

LAYER_NORM_EPS = 1e-5
_STEPS_PER_CHECK = 16
"""Steps of matching pursuit after which it is asked whether all rows have ended, which a device is waited for."""


def encode(config: SAEConfig, tensors: Tensors, rows: torch.Tensor) -> torch.Tensor:
    """Return the activations [n, d_sae] of rows [n, d_in], float32."""
    if config.architecture == "matching_pursuit":
        return _matching_pursuit(config, tensors, rows)
    products, shift = _products(config, tensors, rows)
    if config.architecture == "gated":
        return _gated(tensors, products if shift is None else products - shift)
    rectifier = _rectifier(config, tensors, shift)
    if chooses_k(config.architecture):
        return _top_k(config, tensors, products + rectifier.bias)
    return rectifier(products)


def top(config: SAEConfig, tensors: Tensors, rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids, int64 [n, k], and values of the most active features of rows [n, d_in]; see `SAE.top`."""
    selects = config.architecture.startswith("topk") and not config.rescale_acts_by_decoder_norm
    if config.is_rectified or (selects and k <= config.k):
        # Of TopK, the k largest of the config.k largest are the k largest of all.
        products, shift = _products(config, tensors, rows)
        ids, values = top_values(products, k, _rectifier(config, tensors, shift))
        return ids.long(), values
    features = encode(config, tensors, rows)
    if not config.is_signed:
        ids, values = top_values(features, k)
        return ids.long(), values
    signed = top_values(features.abs(), k)[0].long()
    return signed, features.gather(1, signed)


def _rectifier(config: SAEConfig, tensors: Tensors, shift: torch.Tensor | None) -> Rectifier:
    """Return what products go through, from each of which `shift` is to be subtracted."""
    bias = tensors["b_enc"].float()
    thresholds = tensors["threshold"].float() if config.has_threshold else None
    return Rectifier(bias if shift is None else bias - shift, thresholds)


def _products(config: SAEConfig, tensors: Tensors, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return products [n, d_sae] with the encoder, float32, and what is to be subtracted of each, [d_sae] or None."""
    w_enc, b_dec = tensors["W_enc"], tensors["b_dec"]
    alike = rows.dtype == w_enc.dtype == b_dec.dtype != torch.float32
    if rows.is_cuda and alike and config.normalize_activations == "none":
        # Tensor cores add up exact products in float32, and read the weights as they are. The
        # difference of a row and b_dec would be rounded, so products are subtracted.
        if not config.apply_b_dec_to_input:
            return torch.mm(rows, w_enc, out_dtype=torch.float32), None
        products = torch.mm(torch.cat([rows, b_dec[None]]), w_enc, out_dtype=torch.float32)
        return products[:-1], products[-1]
    x = normalised(config, rows.float())
    if config.apply_b_dec_to_input:
        x = x - b_dec.float()
    return x @ w_enc.float(), None


def decode(config: SAEConfig, tensors: Tensors, features: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Return the reconstruction [n, d_out] of activations [n, d_sae], float32.

    A block of a cross-layer transcoder gives [n, writes, d_out], of which the first row is for its own
    block and alone has its bias and its skip connection.

    Args:
        config: the autoencoder.
        tensors: its weights.
        features: the activations.
        rows: [n, d_in]: what was encoded; used by row normalisations and skip connections.
    """
    if config.rescale_acts_by_decoder_norm:
        norms = decoder_norms(tensors)
        features = features * torch.where(norms > 0, 1 / norms, torch.zeros_like(norms))
    out = torch.tensordot(features, tensors["W_dec"].float(), 1)
    own = out[:, 0] if config.writes else out
    if config.architecture != "matching_pursuit" or config.apply_b_dec_to_input:
        own += tensors["b_dec"].float()
    if rows is None:
        return out
    if config.has_skip:
        own += rows @ tensors["W_skip"].float().T
    return out if config.is_transcoder else _denormalised(config, out, rows)


def normalised(config: SAEConfig, rows: torch.Tensor) -> torch.Tensor:
    """Return rows [n, d_in] with the normalisation that the autoencoder was trained with."""
    if config.normalize_activations == "constant_norm_rescale":
        return rows * _rescaling(rows)
    if config.normalize_activations == "layer_norm":
        centred = rows - rows.mean(-1, keepdim=True)
        return centred / (_spread(rows) + LAYER_NORM_EPS)
    return rows


def decoder_norms(tensors: Tensors) -> torch.Tensor:
    """Return the norms [d_sae] of the decoder's rows, float32."""
    return tensors["W_dec"].float().norm(dim=-1)


def _denormalised(config: SAEConfig, out: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if config.normalize_activations == "constant_norm_rescale":
        return out / _rescaling(rows)
    if config.normalize_activations == "layer_norm":
        # SAELens multiplies by the deviation alone, without the epsilon that it divided by.
        return out * _spread(rows) + rows.mean(-1, keepdim=True)
    return out


def _rescaling(rows: torch.Tensor) -> torch.Tensor:
    """Return the factors [n, 1] that give rows the norm sqrt(d_in)."""
    return rows.shape[-1] ** 0.5 / rows.norm(dim=-1, keepdim=True)


def _spread(rows: torch.Tensor) -> torch.Tensor:
    """Return the standard deviations [n, 1] of rows; SAELens divides by d_in - 1."""
    return rows.std(dim=-1, keepdim=True)


def _gated(tensors: Tensors, projected: torch.Tensor) -> torch.Tensor:
    magnitude = projected * tensors["r_mag"].float().exp() + tensors["b_mag"].float()
    return magnitude.relu() * (projected + tensors["b_gate"].float() > 0)


def _top_k(config: SAEConfig, tensors: Tensors, pre: torch.Tensor) -> torch.Tensor:
    if config.rescale_acts_by_decoder_norm:
        pre = pre * decoder_norms(tensors)
    ids = (pre.abs() if config.is_signed else pre).topk(config.k, dim=-1, sorted=False).indices
    values = pre.gather(-1, ids)
    return torch.zeros_like(pre).scatter_(-1, ids, values if config.is_signed else values.relu())


def _matching_pursuit(config: SAEConfig, tensors: Tensors, rows: torch.Tensor) -> torch.Tensor:
    """Return activations of greedy steps: the decoder's row with the largest product is taken out of what is left.

    A row whose steps have ended keeps its activations while others go on.
    """
    decoder, left = tensors["W_dec"].float(), normalised(config, rows.float())
    if config.apply_b_dec_to_input:
        left = left - tensors["b_dec"].float()
    out = torch.zeros(len(left), len(decoder), device=left.device)
    going = torch.ones(len(left), 1, dtype=torch.bool, device=left.device)
    for step in range(config.k or decoder.shape[1]):
        found, ids = (left @ decoder.T).relu().max(1, keepdim=True)
        found = found * going
        if config.stop_on_duplicate_support:
            # A step that ends it counts, as in SAELens: it adds to a feature that is active already, or nothing.
            going = going & (out.gather(1, ids) == 0) & (found > 0)
        out.scatter_add_(1, ids, found)
        left = left - found * decoder[ids[:, 0]]
        if config.residual_threshold > 0:
            going = going & (left.norm(dim=1, keepdim=True) >= config.residual_threshold)
        if step % _STEPS_PER_CHECK == _STEPS_PER_CHECK - 1 and not going.any():
            break
    return out


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
