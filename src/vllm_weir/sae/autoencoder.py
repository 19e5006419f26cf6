"""`SAE`: a sparse autoencoder or transcoder with its weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import torch
from numpy.typing import ArrayLike

from vllm_weir.errors import WeirError, brief
from vllm_weir.sae import activations, cross_layer, files
from vllm_weir.sae.activations import FeatureResponse, decoder_direction, feature_response
from vllm_weir.sae.config import SAEConfig
from vllm_weir.sae.saelens import Given
from vllm_weir.sae.tensors import as_tensor, check_tensors, parse_dtype
from vllm_weir.schema.fields import is_int, plain, set_fields
from vllm_weir.schema.hooks import Site

MAX_DENSE = 1 << 24
"""Activations of all features that are held at a time."""


@dataclass(frozen=True, eq=False, repr=False)
class SAE:
    """A sparse autoencoder, or a transcoder, with SAELens's names and arithmetic.

    Rows are what Weir captures at `site`; activations are float32 whatever the dtype of the
    weights, which are converted at each call (``sae.to(dtype=torch.float32)`` converts them once).
    A cross-layer transcoder has a transcoder for each of its `layers`: `block` returns it.

    Args:
        config: what it is beside its weights.
        tensors: W_enc [d_in, d_sae], W_dec [d_sae, d_out], b_dec [d_out] and, by architecture,
            b_enc, threshold, b_gate, r_mag, b_mag (all [d_sae]), W_skip [d_out, d_in]. Matching pursuit
            has W_dec and b_dec alone. A cross-layer transcoder has ``W_enc_3`` and so on for each block.

    Raises:
        WeirError: naming the entry or tensor that does not fit.
    """

    config: SAEConfig
    tensors: Mapping[str, torch.Tensor]

    def __post_init__(self) -> None:
        set_fields(self, tensors={name: as_tensor(value, name) for name, value in self.tensors.items()})
        check = cross_layer.check if self.layers else check_tensors
        check(self.config, self.tensors)
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
        (EleutherAI) and circuit-tracer's transcoders, of one block and cross-layer ones; ``.file_format`` says which
        it found. What a file asks for is done or refused. Linear functions of the input, and their inverses for the
        reconstruction, are folded into the weights.

        Args:
            path: a directory with ``cfg.json`` and ``sae_weights.safetensors`` (SAELens 5 and 6,
                and earlier ones), or with ``params.npz``, or that file; or the file or directory of
                another format, under the name with which it was published. Beside ``cfg.json``,
                ``labels.json`` may say what features stand for, ``{"100": "happy"}``.
            site: hook point and layer, for files that do not say them or say them ambiguously, e.g.
                ``("resid_post", 20)``; of a cross-layer transcoder that of its first block.
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
                autoencoder's reconstruction is multiplied by it. Of a cross-layer transcoder
                [blocks, d_in], as `norm_bias` then.
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
        config, tensors, own_dtype = files.load(Path(path), given, name)
        wanted = own_dtype if dtype is None else dtype
        sae = cls(config, tensors)
        return sae.to(device, None if wanted is None else parse_dtype(wanted, "dtype"))

    @classmethod
    def from_tensors(cls, architecture: str, site: object, *, name: str = "", k: int = 0, **given: Any) -> SAE:
        """Make an autoencoder from its weights.

        Args:
            architecture: ``"standard"``, ``"gated"``, ``"jumprelu"``, ``"topk"``, ``"batchtopk"``,
                ``"abstopk"``, ``"matching_pursuit"``, or ``"transcoder"`` with what it has before it, in
                this order: ``jumprelu_``, ``topk_`` or ``abstopk_``, and ``skip_``.
            site: hook point and layer, e.g. ``("resid_post", 10)``.
            name: what it is called.
            k: active features of a row (TopK, AbsTopK); most steps of matching pursuit (0: d_in).
            given: the weights by name (``W_enc=``, ``W_dec=``, ...), tensors or arrays of floats, and
                fields of `SAEConfig`. With ``layers=`` it is a cross-layer transcoder of these blocks, and
                each weight a list with one for each block: W_dec is [d_sae, blocks from this one on, d_out].
        """
        options = {key: value for key, value in given.items() if key in SAEConfig.__dataclass_fields__}
        config = SAEConfig(architecture, site, name=name, k=k, **options)  # type: ignore[arg-type]
        tensors = {key: value for key, value in given.items() if key not in options}
        if config.layers:
            for key, value in tensors.items():
                if len(value) != len(config.layers):
                    raise WeirError(f"expected one for each of {len(config.layers)} blocks, got {len(value)}", key)
            blocks = enumerate(zip(*tensors.values(), strict=True), config.layers[0])
            tensors = cross_layer.joined((layer, dict(zip(tensors, values))) for layer, values in blocks)
        return cls(config, tensors)

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
    def layers(self) -> tuple[int, ...]:
        """The blocks of a cross-layer transcoder; empty for everything that reads one block alone."""
        return self.config.layers

    def block(self, layer: int) -> SAE:
        """Return the transcoder of one block of a cross-layer transcoder.

        It encodes rows of its `site`. What it writes, its reconstruction and its decoder's rows, is
        [..., writes, d_out]: for `out_site` and the same hook point of each later block.

        Raises:
            WeirError: if there is no such block, or it is no cross-layer transcoder.
        """
        if not self.layers:
            raise WeirError(f"it reads {self.site} alone; only a cross-layer transcoder has blocks", "layer")
        config = cross_layer.block_config(self.config, layer)
        return SAE(config, cross_layer.block_tensors(self.config, self.tensors, config.site.layer))

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
        encoder = self._first("W_enc")
        return self.d_out if encoder is None else encoder.shape[0]

    @property
    def d_out(self) -> int:
        """Width of a reconstruction."""
        return self._decoder.shape[-1]

    @property
    def d_sae(self) -> int:
        """Number of features; of each block in a cross-layer transcoder."""
        return self._decoder.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self._decoder.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._decoder.device

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def __repr__(self) -> str:
        where = f"{self.site} to block {self.layers[-1]}" if self.layers else str(self.site)
        return f"SAE({self.name!r}, {self.architecture}, {where}, {self.d_in} -> {self.d_sae}, {self.dtype})"

    def to(self, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> SAE:
        """Return the autoencoder with its weights on a device, in a dtype."""
        moved = {name: tensor.to(device=device, dtype=dtype) for name, tensor in self.tensors.items()}
        return SAE(self.config, moved)

    def renamed(self, name: str) -> SAE:
        """Return the autoencoder under another name."""
        return SAE(replace(self.config, name=name), self.tensors)

    def save(self, path: str | os.PathLike) -> None:
        """Write a directory that `load` reads, and SAELens 6 if it has the architecture.

        A cross-layer transcoder is written as circuit-tracer has it.

        Raises:
            WeirError: if it cannot be written.
        """
        files.write(Path(path), self.config, dict(self.tensors))

    @overload
    def encode(self, rows: Mapping[int, torch.Tensor | ArrayLike]) -> dict[int, torch.Tensor]: ...

    @overload
    def encode(self, rows: torch.Tensor | ArrayLike) -> torch.Tensor: ...

    @torch.no_grad()
    def encode(self, rows: Any) -> Any:
        """Return the activations [n, d_sae] of rows, float32.

        Args:
            rows: [n, d_in] or [n, heads, d_head]; with `head` set also those of all heads. Arrays and
                nested lists are taken wherever tensors are. Of a cross-layer transcoder {block: rows};
                what is returned is {block: activations} then.

        Raises:
            WeirError: if they have another width.
        """
        if self.layers:
            return {layer: self.block(layer).encode(own) for layer, own in self._by_block(rows, "rows").items()}
        return activations.encode(self.config, self.tensors, self._flat(rows))

    @overload
    def decode(
        self,
        features: Mapping[int, torch.Tensor | ArrayLike],
        rows: Mapping[int, torch.Tensor | ArrayLike] | None = None,
    ) -> dict[int, torch.Tensor]: ...

    @overload
    def decode(
        self, features: torch.Tensor | ArrayLike, rows: torch.Tensor | ArrayLike | None = None
    ) -> torch.Tensor: ...

    @torch.no_grad()
    def decode(self, features: Any, rows: Any = None) -> Any:
        """Return the reconstruction [n, d_out] of activations [n, d_sae], float32.

        Args:
            features: the activations. Of a cross-layer transcoder {block: activations}, of the same
                rows at each block; what is returned is {block: reconstruction} then, of all the blocks
                that these write.
            rows: the rows that were encoded. Autoencoders that normalise each row by its own length
                need them, and so do transcoders with a skip connection, which adds W_skip @ row.

        Raises:
            WeirError: if they are needed, or the activations have another width.
        """
        if self.layers:
            given = {} if rows is None else self._by_block(rows, "rows")
            found = self._by_block(features, "features")
            return cross_layer.summed({n: self.block(n).decode(one, given.get(n)) for n, one in found.items()})
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

    def reconstructed(self, rows: torch.Tensor) -> torch.Tensor:
        """Do what `reconstruct` does to rows of an autoencoder, so many at a time that all features fit into memory."""
        return torch.cat([self.reconstruct(some) for some in self._in_parts(rows)])

    @torch.no_grad()
    def top(self, rows: torch.Tensor | ArrayLike, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the most active features of each row.

        Returns:
            (ids int64 [n, k], activations float32 [n, k]), the largest first and equal ones by id;
            where fewer are active, the rest have activation 0. Where activations may be negative
            (AbsTopK), the largest are those of the largest absolute value.
        """
        if not is_int(k) or not 0 < k <= self.d_sae:
            raise WeirError(f"k is from 1 to {self.d_sae}, got {brief(k)}", "k")
        self._check_one_block("rows")
        found = [
            activations.top(self.config, self.tensors, self._flat(some), k)
            for some in self._in_parts(as_tensor(rows, "rows"))
        ]
        ids, values = zip(*found, strict=True)
        return torch.cat(ids), torch.cat(values)

    def chosen(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the activations of some features, float32 [n, ids]; `ids` is int64, on the rows' device."""
        return torch.cat([some[:, ids] for some in self._encoded(rows)])

    def _encoded(self, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        """Encode rows, so many at a time that all features of these fit into memory."""
        return map(self.encode, self._in_parts(rows))

    def _in_parts(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        return rows.split(max(1, MAX_DENSE // self.d_sae))

    def feature_response(self, feature: int) -> FeatureResponse:
        """Return how one feature responds to a row, and what it adds to it.

        Raises:
            WeirError: for a feature that does not exist, and where the response depends on more
                than a product with the row: in TopK, and where rows are normalised one by one.
        """
        self._check_one_block()
        return feature_response(self.config, self.tensors, self._feature(feature))

    def decoder_direction(self, feature: int) -> Any:
        """Return what one unit of a feature adds to the reconstruction, float32 ndarray [d_out].

        Of a block of a cross-layer transcoder it is [writes, d_out].

        Raises:
            WeirError: for a feature that does not exist, and where it depends on the row.
        """
        self._check_one_block()
        return decoder_direction(self.config, self.tensors, self._feature(feature))

    @property
    def _decoder(self) -> torch.Tensor:
        """The decoder, of the first block where there are several."""
        found = self._first("W_dec")
        assert found is not None
        return found

    def _first(self, name: str) -> torch.Tensor | None:
        return self.tensors.get(cross_layer.named(name, self.layers[0]) if self.layers else name)

    def _check_one_block(self, field: str = "layer") -> None:
        """Raise WeirError for a cross-layer transcoder, of which one block has to be taken."""
        if self.layers:
            first, last = self.layers[0], self.layers[-1]
            raise WeirError(f"a cross-layer transcoder has features at blocks {first} to {last}: block(layer)", field)

    def _by_block(self, given: Any, field: str) -> Mapping[int, Any]:
        if not isinstance(given, Mapping):
            first, last = self.layers[0], self.layers[-1]
            raise WeirError(f"expected {{block: {field}}} for blocks {first} to {last}, or take block(layer)", field)
        return given

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


def without_decoder(sae: SAE) -> SAE:
    """Return what workers hold of an autoencoder: everything, but of a cross-layer transcoder what encodes alone."""
    return SAE(sae.config, cross_layer.without_decoder(sae.config, sae.tensors)) if sae.layers else sae
