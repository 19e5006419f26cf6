"""Sparse autoencoders written out feature by feature in float64, against which `vllm_weir.sae` is compared.

The formulas are those of SAELens 5.11 and 6.54 (`encode`, `decode` and `use_error_term` of its classes). Files are
written here as SAELens writes them, with hand-made configurations.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

D_IN, D_SAE, D_OUT = 24, 96, 20
AUTOENCODERS = ("standard", "gated", "jumprelu", "topk", "batchtopk")
TRANSCODERS = ("transcoder", "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder")
CHOOSING = ("topk_transcoder", "topk_skip_transcoder", "abstopk", "abstopk_transcoder", "abstopk_skip_transcoder")
"""The k largest of a row's pre-activations are its features, as in ``topk``."""
PURSUIT = ("residual_threshold", "stop_on_duplicate_support")
"""Options of matching pursuit, whose most steps are ``k``."""


def weights(architecture: str, seed: int = 0, d_in: int = D_IN, d_sae: int = D_SAE) -> dict[str, torch.Tensor]:
    """Return random weights, float32, of which about a third of the features are active on a normal row."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    d_out = D_OUT if "transcoder" in architecture else d_in
    out = {
        "W_enc": normal(d_in, d_sae) / d_in**0.5,
        "W_dec": normal(d_sae, d_out) / d_sae**0.5,
        "b_dec": 0.3 * normal(d_out),
    }
    if architecture == "matching_pursuit":  # whose decoder's rows have norm 1
        del out["W_enc"]
        return out | {"W_dec": out["W_dec"] / out["W_dec"].norm(dim=1, keepdim=True)}
    if architecture == "gated":
        return out | {"b_gate": 0.3 * normal(d_sae), "r_mag": 0.3 * normal(d_sae), "b_mag": 0.3 * normal(d_sae)}
    out["b_enc"] = 0.3 * normal(d_sae)
    if "jumprelu" in architecture:
        out["threshold"] = 0.4 + 0.5 * normal(d_sae)  # some below zero, where ReLU decides
    if architecture == "batchtopk":
        out["threshold"] = torch.full((d_sae,), 0.37)
    if "skip" in architecture:
        out["W_skip"] = normal(d_out, d_in) / d_in**0.5
    return out


def rows(n: int = 40, seed: int = 1, width: int = D_IN) -> torch.Tensor:
    return 1.5 * torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


class Reference:
    """One autoencoder; options are those of SAELens's configuration."""

    def __init__(self, architecture: str, tensors: dict[str, torch.Tensor], **options: Any) -> None:
        self.architecture, self.options = architecture, options
        self.w = {name: tensor.double().numpy() for name, tensor in tensors.items()}

    def encode(self, h: torch.Tensor) -> np.ndarray:
        return np.stack([self._encode_row(row) for row in h.double().numpy()])

    def decode(self, features: np.ndarray, h: torch.Tensor) -> np.ndarray:
        return np.stack([self._decode_row(f, row) for f, row in zip(features, h.double().numpy(), strict=True)])

    def with_feature(self, h: torch.Tensor, feature: int, target: float) -> np.ndarray:
        """Return the rows with a feature set, as a hook on SAELens's activations with `use_error_term` does."""
        features = self.encode(h)
        error = h.double().numpy() - self.decode(features, h)
        features[:, feature] = target
        return self.decode(features, h) + error

    def _in(self, row: np.ndarray) -> np.ndarray:
        kind = self.options.get("normalize_activations", "none")
        if kind == "expected_average_only_in":
            row = row * self.options["norm_scaling_factor"]
        if kind == "constant_norm_rescale":
            row = row * (len(row) ** 0.5 / np.linalg.norm(row))
        if kind == "layer_norm":
            row = (row - row.mean()) / (row.std(ddof=1) + 1e-5)
        return row - self.w["b_dec"] if self.options.get("apply_b_dec_to_input") else row

    def _encode_row(self, row: np.ndarray) -> np.ndarray:
        w, x = self.w, self._in(row)
        if self.architecture == "matching_pursuit":
            return self._pursue(x)
        out = np.zeros(w["W_enc"].shape[1])
        for f in range(len(out)):
            dot = x @ w["W_enc"][:, f]
            if self.architecture == "gated":
                magnitude = max(dot * np.exp(w["r_mag"][f]) + w["b_mag"][f], 0.0)
                out[f] = magnitude if dot + w["b_gate"][f] > 0 else 0.0
                continue
            out[f] = dot + w["b_enc"][f]
            if self.options.get("rescale_acts_by_decoder_norm"):
                out[f] *= np.linalg.norm(w["W_dec"][f])
        if "topk" in self.architecture and self.architecture != "batchtopk":
            smallest_first = np.argsort(np.abs(out) if "abs" in self.architecture else out)
            out[smallest_first[: len(out) - self.options["k"]]] = 0.0
        if "abs" in self.architecture:
            return out
        if "threshold" in w:
            out = np.where(out > w["threshold"], out, 0.0)
        return np.maximum(out, 0.0)

    def _pursue(self, left: np.ndarray) -> np.ndarray:
        """Return activations of greedy steps, each of which takes out what it has found."""
        w, out = self.w["W_dec"], np.zeros(len(self.w["W_dec"]))
        for _ in range(self.options.get("k") or len(left)):
            products = w @ left
            best = int(products.argmax())
            known = out[best] != 0 or products[best] <= 0
            out[best] += max(products[best], 0.0)
            left = left - max(products[best], 0.0) * w[best]
            if self.options.get("stop_on_duplicate_support") and known:
                break
            if np.linalg.norm(left) < self.options.get("residual_threshold", 0.0):
                break
        return out

    def _decode_row(self, features: np.ndarray, row: np.ndarray) -> np.ndarray:
        w = self.w
        if self.options.get("rescale_acts_by_decoder_norm"):
            features = features / np.linalg.norm(w["W_dec"], axis=1)
        out = w["b_dec"].copy()
        if self.architecture == "matching_pursuit" and not self.options.get("apply_b_dec_to_input"):
            out[:] = 0.0
        for f in np.flatnonzero(features):
            out += features[f] * self.options.get("factors", np.ones(len(features)))[f] * w["W_dec"][f]
        if "W_skip" in w:
            out += w["W_skip"] @ row
        if "transcoder" in self.architecture:
            return out
        kind = self.options.get("normalize_activations", "none")
        if kind == "expected_average_only_in":
            out = out / self.options["norm_scaling_factor"]
        if kind == "constant_norm_rescale":
            out = out * np.linalg.norm(row) / len(row) ** 0.5
        if kind == "layer_norm":
            out = out * row.std(ddof=1) + row.mean()
        return out


def write_v6(path: Path, architecture: str, tensors: dict[str, torch.Tensor], /, **entries: Any) -> Path:
    """Write a directory as SAELens 6 does."""
    metadata = {
        "sae_lens_version": "6.54.12",
        "sae_lens_training_version": "6.54.12",
        "model_name": "tiny",
        "hook_name": "blocks.1.mlp.hook_in" if "transcoder" in architecture else "blocks.2.hook_resid_post",
        "hook_head_index": None,
        "prepend_bos": True,
    }
    metadata |= entries.pop("metadata", {})
    cfg = {
        "architecture": architecture,
        "d_in": tensors["W_enc"].shape[0] if "W_enc" in tensors else tensors["W_dec"].shape[1],
        "d_sae": tensors["W_dec"].shape[0],
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": False,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": metadata,
    }
    if "transcoder" in architecture:
        cfg["d_out"] = tensors["W_dec"].shape[1]
        metadata["hook_name_out"] = "blocks.1.hook_mlp_out"
    return _write(path, {**cfg, **entries}, tensors)


def write_v5(path: Path, architecture: str, tensors: dict[str, torch.Tensor], /, **entries: Any) -> Path:
    """Write a directory as SAELens 5 does: TopK as an activation function, everything in one object."""
    k = entries.pop("k", None)
    cfg = {
        "architecture": architecture,
        "d_in": tensors["W_enc"].shape[0],
        "d_sae": tensors["W_enc"].shape[1],
        "dtype": "float32",
        "device": "cpu",
        "model_name": "tiny",
        "hook_name": "blocks.2.hook_resid_post",
        "hook_layer": 2,
        "hook_head_index": None,
        "activation_fn_str": "topk" if k else "relu",
        "activation_fn_kwargs": {"k": k} if k else {},
        "apply_b_dec_to_input": False,
        "finetuning_scaling_factor": False,
        "sae_lens_training_version": "5.11.0",
        "prepend_bos": True,
        "dataset_path": "stories",
        "dataset_trust_remote_code": True,
        "context_size": 128,
        "normalize_activations": "none",
        "neuronpedia_id": None,
        "model_from_pretrained_kwargs": {},
        "seqpos_slice": [None],
    }
    return _write(path, {**cfg, **entries}, tensors)


def write_npz(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write Gemma Scope's file."""
    path.mkdir(parents=True, exist_ok=True)
    np.savez(path / "params.npz", **{name: tensor.numpy() for name, tensor in tensors.items()})
    return path / "params.npz"


def _write(path: Path, cfg: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "sae_weights.safetensors")
    (path / "cfg.json").write_text(json.dumps(cfg))
    return path
