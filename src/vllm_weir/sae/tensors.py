"""The weights of an autoencoder: checks of their shapes, and linear functions of the input folded into them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import ArrayLike

from vllm_weir.errors import WeirError
from vllm_weir.sae.config import SAEConfig

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
_COLUMNS = 4096
"""Columns of the encoder that are converted to float64 at a time."""


def parse_dtype(dtype: object, field: str) -> torch.dtype:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise WeirError(f"unknown dtype {name[:40]!r}; choose from {', '.join(DTYPES)}", field)
    return DTYPES[name]


def as_tensor(value: torch.Tensor | ArrayLike, field: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    try:
        if isinstance(value, np.ndarray):  # torch takes none that is read-only, reversed or of another byte order
            value = np.require(value, value.dtype.newbyteorder("="), ["C", "W"])
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise WeirError(f"expected a tensor or an array of numbers, got {_described(value)}", field) from None


def _described(value: object) -> str:
    dtype = f" of {value.dtype}" if isinstance(value, np.ndarray) else ""
    return f"{type(value).__name__}{dtype}"


def for_file(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights as safetensors writes them: on the CPU, contiguous, none in the memory of another."""
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        on_cpu = tensor.detach().to("cpu").contiguous()
        kept[name] = on_cpu.clone() if any(_overlap(on_cpu, other) for other in kept.values()) else on_cpu
    return kept


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether contiguous tensors share memory. Those mapped from one file share its storage, which is less."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def check_tensors(config: SAEConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise WeirError, naming a tensor, unless these are the weights of that architecture with fitting shapes."""
    for name in config.tensor_names:
        if name not in tensors:
            raise WeirError(f"missing; a {config.architecture} SAE has {', '.join(config.tensor_names)}", name)
    for name, tensor in tensors.items():
        if name not in config.tensor_names:
            raise WeirError(f"a {config.architecture} SAE has no such tensor", name)
        if tensor.dtype not in DTYPES.values():
            raise WeirError(f"expected floats, got {tensor.dtype}", name)
    decoder, blocks = tensors["W_dec"], (config.writes,) if config.writes else ()
    tied = decoder.mT if "W_enc" not in tensors and decoder.ndim == 2 else decoder
    encoder = tensors.get("W_enc", tied)
    if encoder.ndim != 2 or decoder.ndim != 2 + len(blocks):
        written = "[d_sae, blocks, d_out]" if blocks else "[d_sae, d_out]"
        raise WeirError(f"W_enc is [d_in, d_sae] and W_dec {written}", "W_enc")
    (d_in, d_sae), d_out = encoder.shape, decoder.shape[-1]
    if not config.is_transcoder and d_out != d_in:
        raise WeirError(f"an autoencoder reads and reconstructs the same width, got {d_in} and {d_out}", "W_dec")
    shapes = {"W_enc": (d_in, d_sae), "W_dec": (d_sae, *blocks, d_out), "b_dec": (d_out,), "W_skip": (d_out, d_in)}
    for name, tensor in tensors.items():
        expected = shapes.get(name, (d_sae,))
        if tuple(tensor.shape) != expected:
            raise WeirError(f"expected shape {list(expected)}, got {list(tensor.shape)}", name)
    if config.k > d_sae and config.architecture != "matching_pursuit":  # whose steps may come back to a feature
        raise WeirError(f"{config.k} active features of {d_sae}", "k")


def check_finite(tensors: Mapping[str, torch.Tensor], field: str) -> None:
    """Raise WeirError, naming the tensor within `field`, if a feature would give NaN.

    What is compared or passed through a ReLU may be infinite: that is a feature which is never active.
    """
    for name, tensor in tensors.items():
        per_feature = name in ("b_enc", "threshold", "b_gate", "b_mag")
        if bool(tensor.isnan().any() if per_feature else not tensor.sum(dtype=torch.float64).isfinite()):
            raise WeirError("contains NaN or Inf", f"{field}.{name}")


def scale_input(tensors: dict[str, torch.Tensor], factor: float) -> None:
    """Fold a factor into the weights: the input is multiplied by it, the reconstruction divided by it.

    Biases of the encoder and thresholds belong to the scaled input and stay as they are.
    """
    if factor == 1:
        return
    tensors["W_enc"] = tensors["W_enc"].float() * factor
    tensors["W_dec"] = tensors["W_dec"].float() / factor
    tensors["b_dec"] = tensors["b_dec"].float() / factor


def scale_features(tensors: dict[str, torch.Tensor], factors: torch.Tensor) -> None:
    """Fold factors [d_sae] of the activations, applied before they are decoded, into the decoder."""
    tensors["W_dec"] = tensors["W_dec"].float() * factors.float()[:, None]


def scale_by_decoder_norms(tensors: dict[str, torch.Tensor]) -> None:
    """Fold the norms of the decoder's rows into the encoder, so that each row of the decoder has norm 1."""
    norms = tensors["W_dec"].float().norm(dim=-1).clamp(min=1e-8)
    tensors["W_dec"] = tensors["W_dec"].float() / norms[:, None]
    tensors["W_enc"] = tensors["W_enc"].float() * norms
    tensors["b_enc"] = tensors["b_enc"].float() * norms


def subtract_b_dec_in_encoder(tensors: dict[str, torch.Tensor]) -> None:
    shift_input(tensors, -tensors["b_dec"].double())


def divide_input(tensors: dict[str, torch.Tensor], divisor: torch.Tensor) -> None:
    """Fold the division of the input by [d_in] into the weights that read it."""
    tensors["W_enc"] = tensors["W_enc"].float() / divisor.float()[:, None]
    if "W_skip" in tensors:
        tensors["W_skip"] = tensors["W_skip"].float() / divisor.float()


def multiply_output(tensors: dict[str, torch.Tensor], factor: torch.Tensor, shift: torch.Tensor | None) -> None:
    """Fold a factor and the addition of `shift`, both [d_out], of the reconstruction into the decoder."""
    tensors["W_dec"] = tensors["W_dec"].float() * factor.float()
    b_dec = tensors["b_dec"].double() * factor.double()
    tensors["b_dec"] = (b_dec if shift is None else b_dec + shift.double()).float()


def centre_input(tensors: dict[str, torch.Tensor]) -> None:
    """Fold the subtraction of each row's mean from the input into the weights that read it."""
    encoder = tensors["W_enc"].float()
    tensors["W_enc"] = encoder - encoder.mean(0, keepdim=True)
    if "W_skip" in tensors:
        skip = tensors["W_skip"].float()
        tensors["W_skip"] = skip - skip.mean(1, keepdim=True)


def shift_input(tensors: dict[str, torch.Tensor], shift: torch.Tensor) -> None:
    """Fold the addition of `shift` [d_in] to the input into the biases; computed in float64."""
    encoder = tensors["W_enc"]
    parts = [shift @ encoder[:, at : at + _COLUMNS].double() for at in range(0, encoder.shape[1], _COLUMNS)]
    pre = torch.cat(parts)
    if "b_enc" in tensors:
        tensors["b_enc"] = (tensors["b_enc"].double() + pre).float()
    else:
        tensors["b_gate"] = (tensors["b_gate"].double() + pre).float()
        tensors["b_mag"] = (tensors["b_mag"].double() + pre * tensors["r_mag"].double().exp()).float()
    if "W_skip" in tensors:
        tensors["b_dec"] = (tensors["b_dec"].double() + tensors["W_skip"].double() @ shift).float()
