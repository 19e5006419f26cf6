"""The arithmetic of sparse autoencoders, as SAELens defines it, on torch tensors in float32."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vllm_weir.sae.config import SAEConfig

Tensors = Mapping[str, torch.Tensor]

LAYER_NORM_EPS = 1e-5


def encode(config: SAEConfig, tensors: Tensors, rows: torch.Tensor) -> torch.Tensor:
    """Return the activations [n, d_sae] of rows [n, d_in], float32."""
    projected = _projected(config, tensors, rows)
    if config.architecture == "gated":
        return _gated(tensors, projected)
    pre = projected + tensors["b_enc"].float()
    if config.architecture == "topk":
        return _top_k(config, tensors, pre)
    if config.has_threshold:
        return pre.relu() * (pre > tensors["threshold"].float())
    return pre.relu()


def _projected(config: SAEConfig, tensors: Tensors, rows: torch.Tensor) -> torch.Tensor:
    """Return the products [n, d_sae] of rows [n, d_in] with the encoder, float32, without its bias."""
    w_enc, b_dec = tensors["W_enc"], tensors["b_dec"]
    alike = rows.dtype == w_enc.dtype == b_dec.dtype != torch.float32
    if rows.is_cuda and alike and config.normalize_activations == "none":
        # Tensor cores add up exact products in float32, and read the weights as they are. The
        # difference of a row and b_dec would be rounded, so the products are subtracted.
        if not config.apply_b_dec_to_input:
            return torch.mm(rows, w_enc, out_dtype=torch.float32)
        products = torch.mm(torch.cat([rows, b_dec[None]]), w_enc, out_dtype=torch.float32)
        return products[:-1] - products[-1:]
    x = normalised(config, rows.float())
    if config.apply_b_dec_to_input:
        x = x - b_dec.float()
    return x @ w_enc.float()


def decode(config: SAEConfig, tensors: Tensors, features: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Return the reconstruction [n, d_out] of activations [n, d_sae], float32.

    Args:
        config: the autoencoder.
        tensors: its weights.
        features: the activations.
        rows: [n, d_in]: what was encoded; used by row normalisations and skip connections.
    """
    if config.rescale_acts_by_decoder_norm:
        norms = decoder_norms(tensors)
        features = features * torch.where(norms > 0, 1 / norms, torch.zeros_like(norms))
    out = features @ tensors["W_dec"].float() + tensors["b_dec"].float()
    if rows is None:
        return out
    if config.has_skip:
        out = out + rows @ tensors["W_skip"].float().T
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
    """Return a reconstruction in the units of the rows."""
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
    values, ids = pre.topk(config.k, dim=-1, sorted=False)
    return torch.zeros_like(pre).scatter_(-1, ids, values.relu())
