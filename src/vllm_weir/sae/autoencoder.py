"""`SAE`: a sparse autoencoder or transcoder with its weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from numpy.typing import ArrayLike

from vllm_weir.errors import WeirError, brief
from vllm_weir.sae import activations, files
from vllm_weir.sae.config import SAEConfig
from vllm_weir.sae.response import FeatureResponse, decoder_direction, feature_response
from vllm_weir.sae.saelens import Given
from vllm_weir.sae.tensors import as_tensor, check_tensors, parse_dtype
from vllm_weir.schema.fields import set_fields
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.scalars import is_int, plain
from vllm_weir.util.top import top_values

MAX_DENSE = 1 << 24
"""Activations of all features that are held at a time."""


@dataclass(frozen=True, eq=False, repr=False)
class SAE:
    """A sparse autoencoder, or a transcoder, with SAELens's names and arithmetic.

    Rows are what Weir captures at `site`; activations are float32 whatever the dtype of the
    weights, which are converted at each call (``sae.to(dtype=torch.float32)`` converts them once).

    Args:
        config: what it is beside its weights.
        tensors: W_enc [d_in, d_sae], W_dec [d_sae, d_out], b_dec [d_out] and, by architecture,
            b_enc, threshold, b_gate, r_mag, b_mag (all [d_sae]), W_skip [d_out, d_in].

    Raises:
        WeirError: naming the entry or tensor that does not fit.
    """

    config: SAEConfig
    tensors: Mapping[str, torch.Tensor]

    def __post_init__(self) -> None:
        set_fields(self, tensors={name: as_tensor(value, name) for name, value in self.tensors.items()})
        check_tensors(self.config, self.tensors)
        if (last := max(self.config.labels, default=0)) >= self.d_sae:
            raise WeirError(f"features count from 0 to {self.d_sae - 1}, got {brief(last)}", "labels")

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        *,
        site: object = None,
        out_site: object = None,
        name: str = "",
        device: str | torch.device = "cpu",
        dtype: Any = None,
        norm_scaling_factor: float | None = None,
        norm_weight: torch.Tensor | float | None = None,
        norm_bias: torch.Tensor | float | None = None,
        center_rows: bool | None = None,
    ) -> SAE:
        """Load an autoencoder from a directory of SAELens, or from files that others publish.

        These are Gemma Scope (1 and 2), Llama Scope, Qwen Scope, Goodfire, dictionary_learning, sparsify
        (EleutherAI) and circuit-tracer's transcoders of one block; ``.file_format`` says which it found. What a file
        asks for is done or refused. Linear functions of the input, and their inverses for the
        reconstruction, are folded into the weights.

        Args:
            path: a directory with ``cfg.json`` and ``sae_weights.safetensors`` (SAELens 5 and 6,
                and earlier ones), or with ``params.npz``, or that file; or the file or directory of
                another format, under the name with which it was published. Beside ``cfg.json``,
                ``labels.json`` may say what features stand for, ``{"100": "happy"}``.
            site: hook point and layer, for files that do not say them or say them ambiguously, e.g.
                ``("resid_post", 20)``.
            out_site: what a transcoder reconstructs, if neither the file says it nor it is
                ``mlp_out`` of the block.
            name: its name; the directory's if empty.
            device: where the weights go.
            dtype: of the weights; None for the file's.
            norm_scaling_factor: for ``normalize_activations: expected_average_only_in``: the factor
                of the rows, unless ``activation_scaler.json`` beside the weights has it.
            norm_weight: for autoencoders of ``hook_normalized``, and Gemma Scope's transcoders:
                what the norm multiplies by, [d_in] (1 + weight in Gemma); or 1 if the autoencoder
                was trained on rows that have it. It is divided out of the rows, and an
                autoencoder's reconstruction is multiplied by it.
            norm_bias: what that norm adds, [d_in].
            center_rows: whether the mean of each row is subtracted first, as TransformerLens's
                ``center_writing_weights`` does in models with LayerNorm. The reconstruction is of
                the row without its mean, which a LayerNorm does not see.

        Raises:
            WeirError: naming the entry, tensor or argument.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise WeirError(f"expected the path of a file or folder, got {type(path).__name__}", "path")
        given = Given(site, out_site, norm_scaling_factor, norm_weight, norm_bias, center_rows)
        file, read = files.read(Path(path), given, name)
        config, tensors = files.fold(file, read, given)
        wanted = file.dtype if dtype is None else dtype
        sae = cls(config, tensors)
        return sae.to(device, None if wanted is None else parse_dtype(wanted, "dtype"))

    @classmethod
    def from_tensors(cls, architecture: str, site: object, *, name: str = "", k: int = 0, **given: Any) -> SAE:
        """Make an autoencoder from its weights.

        Args:
            architecture: ``"standard"``, ``"gated"``, ``"jumprelu"``, ``"topk"``, ``"batchtopk"``,
                ``"transcoder"``, ``"jumprelu_transcoder"``, ``"skip_transcoder"`` or
                ``"jumprelu_skip_transcoder"``.
            site: hook point and layer, e.g. ``("resid_post", 10)``.
            name: what it is called.
            k: active features of a row (TopK).
            given: the weights by name (``W_enc=``, ``W_dec=``, ...), tensors or arrays of floats, and
                fields of `SAEConfig`.
        """
        options = {key: value for key, value in given.items() if key in SAEConfig.__dataclass_fields__}
        config = SAEConfig(architecture, site, name=name, k=k, **options)  # type: ignore[arg-type]
        return cls(config, {key: value for key, value in given.items() if key not in options})

    @property
    def site(self) -> Site:
        """The hook point that it reads."""
        return self.config.site

    @property
    def out_site(self) -> Site:
        """The hook point that it reconstructs: `site`, except in transcoders."""
        assert self.config.out_site is not None
        return self.config.out_site

    @property
    def file_format(self) -> str:
        """The format of the files that it was loaded from, ``"saelens"`` unless these were of another project."""
        return str(self.config.metadata.get("file_format", "saelens"))

    @property
    def head(self) -> int | None:
        """The head whose rows it reads; None for all of them."""
        return self.config.head

    @property
    def architecture(self) -> str:
        """SAELens's name of its architecture."""
        return self.config.architecture

    @property
    def name(self) -> str:
        """What it is called."""
        return self.config.name

    @property
    def labels(self) -> Mapping[int, str]:
        """What features stand for, {feature: text}; most autoencoders come without."""
        return self.config.labels

    @property
    def d_in(self) -> int:
        """Width of a row that is encoded; heads times d_head at hook points with heads."""
        return self.tensors["W_enc"].shape[0]

    @property
    def d_out(self) -> int:
        """Width of a reconstruction."""
        return self.tensors["W_dec"].shape[1]

    @property
    def d_sae(self) -> int:
        """Number of features."""
        return self.tensors["W_enc"].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.tensors["W_enc"].dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.tensors["W_enc"].device

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def __repr__(self) -> str:
        return f"SAE({self.name!r}, {self.architecture}, {self.site}, {self.d_in} -> {self.d_sae}, {self.dtype})"

    def to(self, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> SAE:
        """Return the autoencoder with its weights on a device, in a dtype."""
        moved = {name: tensor.to(device=device, dtype=dtype) for name, tensor in self.tensors.items()}
        return SAE(self.config, moved)

    def renamed(self, name: str) -> SAE:
        """Return the autoencoder under another name."""
        return SAE(replace(self.config, name=name), self.tensors)

    def save(self, path: str | os.PathLike) -> None:
        """Write a directory that SAELens 6 and `load` read; raise WeirError if it cannot be written."""
        files.write(Path(path), self.config, dict(self.tensors))

    @torch.no_grad()
    def encode(self, rows: torch.Tensor | ArrayLike) -> torch.Tensor:
        """Return the activations [n, d_sae] of rows, float32.

        Args:
            rows: [n, d_in] or [n, heads, d_head]; with `head` set also those of all heads. Arrays and
                nested lists are taken wherever tensors are.

        Raises:
            WeirError: if they have another width.
        """
        return activations.encode(self.config, self.tensors, self._flat(rows))

    @torch.no_grad()
    def decode(self, features: torch.Tensor | ArrayLike, rows: torch.Tensor | ArrayLike | None = None) -> torch.Tensor:
        """Return the reconstruction [n, d_out] of activations [n, d_sae], float32.

        Args:
            features: the activations.
            rows: the rows that were encoded. Autoencoders that normalise each row by its own length
                need them, and so do transcoders with a skip connection, which adds W_skip @ row.

        Raises:
            WeirError: if they are needed, or the activations have another width.
        """
        features = as_tensor(features, "features")
        if features.ndim != 2 or features.shape[1] != self.d_sae:
            raise WeirError(f"expected activations [n, {self.d_sae}], got {list(features.shape)}", "features")
        config = self.config
        why = f"{config.normalize_activations} is undone with the rows' own lengths"
        if config.has_skip:
            why = "its skip connection adds W_skip @ row"
        by_row = config.normalize_activations != "none" and not config.is_transcoder
        if rows is None and (by_row or config.has_skip):
            raise WeirError(f"{why}: decode(features, rows), or reconstruct(rows)", "rows")
        flat = None if rows is None else self._flat(rows).float()
        return activations.decode(self.config, self.tensors, features.to(self.device, torch.float32), flat)

    def reconstruct(self, rows: torch.Tensor | ArrayLike) -> torch.Tensor:
        """Return the reconstruction [n, d_out] of rows, float32; of `out_site` in transcoders."""
        rows = as_tensor(rows, "rows")
        return self.decode(self.encode(rows), rows)

    def top(self, rows: torch.Tensor | ArrayLike, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the most active features of each row.

        Returns:
            (ids int64 [n, k], activations float32 [n, k]), the largest first and equal ones by id;
            where fewer are active, the rest have activation 0.
        """
        if not is_int(k) or not 0 < k <= self.d_sae:
            raise WeirError(f"k is from 1 to {self.d_sae}, got {brief(k)}", "k")
        ids, values = zip(*(top_values(some, k) for some in self._encoded(as_tensor(rows, "rows"))), strict=True)
        return torch.cat(ids).long(), torch.cat(values)

    def chosen(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the activations of some features, float32 [n, ids]; `ids` is int64, on the rows' device."""
        return torch.cat([some[:, ids] for some in self._encoded(rows)])

    def _encoded(self, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        """Encode rows, so many at a time that all features of these fit into memory."""
        return map(self.encode, rows.split(max(1, MAX_DENSE // self.d_sae)))

    def feature_response(self, feature: int) -> FeatureResponse:
        """Return how one feature responds to a row, and what it adds to it.

        Raises:
            WeirError: for a feature that does not exist, and where the response depends on more
                than a product with the row: in TopK, and where rows are normalised one by one.
        """
        return feature_response(self.config, self.tensors, self._feature(feature))

    def decoder_direction(self, feature: int) -> Any:
        """Return what one unit of a feature adds to the reconstruction, float32 ndarray [d_out].

        Raises:
            WeirError: for a feature that does not exist, and where it depends on the row.
        """
        return decoder_direction(self.config, self.tensors, self._feature(feature))

    def _feature(self, feature: int) -> int:
        feature = plain(feature)
        if not is_int(feature) or not 0 <= feature < self.d_sae:
            raise WeirError(f"features count from 0 to {self.d_sae - 1}, got {brief(feature)}", "feature")
        return int(feature)

    def _flat(self, rows: torch.Tensor | ArrayLike) -> torch.Tensor:
        """Return rows as [n, d_in], on the device of the weights."""
        rows = as_tensor(rows, "rows")
        if rows.ndim == 3 and self.head is not None:
            if self.head >= rows.shape[1]:
                raise WeirError(f"the rows have {rows.shape[1]} heads, this is for head {self.head}", "rows")
            rows = rows[:, self.head]
        flat = rows.flatten(1) if rows.ndim > 2 else rows
        if flat.ndim != 2 or flat.shape[1] != self.d_in:
            heads = "" if self.head is None else f" of head {self.head}"
            raise WeirError(f"expected rows [n, {self.d_in}]{heads}, got {list(rows.shape)}", "rows")
        return flat.to(self.device)
