"""The activations of one sequence, as a request gets them back."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from vllm_weir import codec
from vllm_weir.errors import WeirError
from vllm_weir.results.checksum import checksums
from vllm_weir.results.safetensors_header import CODES, build_header
from vllm_weir.results.site_slices import KEYS, NOT_STACKED, QUERIES, STREAM, SiteSlices, Stacked, without_base
from vllm_weir.schema.hooks import Site, parse_site
from vllm_weir.util import notebook
from vllm_weir.util.atomic_write import atomic_write
from vllm_weir.util.token_texts import SequenceTexts

MAX_VALUES = 8
"""Values of a row up to which a notebook shows them, and not the row's norm."""


@dataclass(frozen=True)
class CompressedRows:
    """Compressed rows of one sequence."""

    header: dict[str, Any]  # how to read the records, see docs/reference/file-formats.md
    records: Mapping[Site, torch.Tensor]  # site -> uint8 [rows, record_bytes]
    dtypes: Mapping[Site, str]  # site -> dtype of the decoded rows, by name

    def __getstate__(self) -> dict[str, Any]:
        records = self.records
        if isinstance(records, dict):
            records = {site: without_base(tensor) for site, tensor in records.items()}
        return {**self.__dict__, "records": records}

    def decode(self, site: Site) -> torch.Tensor:
        """Return the rows of a site, [rows, d_model] or of the shape in the header."""
        return codec.decode(self.records[site], self.header).to(getattr(torch, self.dtypes[site]))


class Activations(Mapping):
    """Rows of one sequence by site: ``acts["resid_post", 10]`` is a CPU tensor [rows, d_model].

    Rows of points that have one for each head are [rows, heads, d_head], those of neurons
    [rows, d_mlp], those of experts [rows, experts] or [rows, top_k]; ``expert_ids`` are int64.
    ``pattern`` and ``attn_scores`` are [rows, heads, keys].

    Rows are in ascending order of position. Keys are (hook, layer) pairs, anything else that names
    a site (such as ``"resid_post.10"``, see `parse_site`), and for requests that used vllm-lens's
    keys: ``"residual_stream"``, a tensor [layers, rows, d_model], blocks ascending; ``"attn_q"``
    [layers, rows, heads, d_head], ``"attn_k"`` [layers, rows, key-value heads, d_head],
    ``"qk_layers"``, the list of their blocks, and ``"qk_meta"``, a list of one dict a block.

    Args:
        rows: the rows by site; empty if they are compressed.
        positions: int64 [rows] by site.
        token_ids: int64 [rows] by site.
        lens_layers: blocks that were asked for by vllm-lens's ``output_residual_stream``.
        packed: the rows, if they are compressed.
        stacked: in place of `lens_layers`, all that was asked for by vllm-lens's keys.
    """

    texts = SequenceTexts()
    """Of the tokens, for notebooks."""

    def __init__(
        self,
        rows: Mapping[Site, torch.Tensor],
        positions: Mapping[Site, torch.Tensor],
        token_ids: Mapping[Site, torch.Tensor],
        lens_layers: tuple[int, ...] = (),
        packed: CompressedRows | None = None,
        stacked: Stacked = NOT_STACKED,
    ) -> None:
        self._rows = rows
        self._packed = packed
        self._tensors: dict[Any, torch.Tensor] = {}
        """Rows by site that have been looked at. (A Site equals the plain pair of its names.)"""
        self._positions = positions
        self._token_ids = token_ids
        self.stacked = Stacked(tuple(lens_layers)) if lens_layers else stacked

    def __getstate__(self) -> dict[str, Any]:
        rows = self._rows
        if isinstance(rows, dict):
            rows = {site: without_base(tensor) for site, tensor in rows.items()}
        # Tensors of a block or a dict are views of `rows`, so they need not be pickled twice.
        views = self._packed is None and isinstance(rows, (SiteSlices, dict))
        tensors = {} if views else {key: without_base(tensor) for key, tensor in self._tensors.items()}
        return {**self.__dict__, "_rows": rows, "_tensors": tensors}

    @property
    def sites(self) -> list[Site]:
        """The captured sites, by block and then by place in the block."""
        return list(self._positions)

    def count(self, site: Site) -> int:
        """Return the number of rows of a captured site."""
        return len(self._positions[site])

    @property
    def is_compressed(self) -> bool:
        """Whether the rows were compressed on the device."""
        return self._packed is not None

    def compressed(self, hook: object, layer: int | None = None) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return a site's records, uint8 [rows, record_bytes], and the header that describes them.

        Args:
            hook: a hook point, or a whole site.
            layer: the hook point's block.

        Raises:
            WeirError: if the rows were not compressed.
            KeyError: if the site was not captured.
        """
        packed = self._packed
        if packed is None:
            raise WeirError("these rows are not compressed; to get compressed ones, ask for Capture(..., compress=...)")
        return packed.records[self._site(hook, layer)], packed.header

    def __getitem__(self, key: object) -> torch.Tensor:
        try:
            return self._tensors[key]
        except (KeyError, TypeError):
            return self._look_up(key)

    def _look_up(self, key: object) -> torch.Tensor:
        """Return the rows of a key that has not been looked at in this form."""
        if isinstance(key, str) and key in self.stacked.names:
            return self._stack(key)
        return self._row(self._site(key))

    def _stack(self, name: str) -> Any:
        """Return the rows of several blocks as one tensor, or what is told of them."""
        tensors = self.stacked.tensors()
        if name not in tensors:
            return self.stacked.values()[name]
        if name != STREAM:
            self._check_whole([*tensors[QUERIES], *tensors[KEYS]])
        return torch.stack(list(map(self._row, tensors[name])))

    def _check_whole(self, sites: list[Site]) -> None:
        """Raise WeirError unless these have rows at the same positions, all from the first on: patterns need them."""
        every = torch.arange(self.count(sites[0]))
        for site in sites:
            if not torch.equal(self._positions[site], every):
                raise WeirError(
                    f"{QUERIES} and {KEYS} are rows of all positions from the first on, and this output lacks some of "
                    f"{site}; read q_rot and k_rot, and the positions that positions_of says"
                )

    def _row(self, site: Site) -> torch.Tensor:
        """Return a site's rows, decoded when they are first asked for."""
        if site not in self._tensors:
            if self._packed is not None:
                self._tensors[site] = self._packed.decode(site)
            elif isinstance(self._rows, SiteSlices):
                self._tensors = self._rows.every
            else:  # a mapping of a stored file reads the rows now
                self._tensors[site] = self._rows[site]
        return self._tensors[site]

    def __iter__(self) -> Iterator[Site]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str) and key in self.stacked.names:
            return True
        try:
            return parse_site(key) in self._positions
        except WeirError:
            return False

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the rows, int64 [rows], ascending; WeirError if sites differ in them."""
        return self._shared(self._positions, "positions")

    @property
    def token_ids(self) -> torch.Tensor:
        """Token at each row's position, int64 [rows]; WeirError if sites differ in positions."""
        return self._shared(self._token_ids, "token_ids")

    def positions_of(self, hook: object, layer: int | None = None) -> torch.Tensor:
        """Return the positions of a site's rows, int64 [rows]; arguments as for `compressed`."""
        return self._positions[self._site(hook, layer)]

    def token_ids_of(self, hook: object, layer: int | None = None) -> torch.Tensor:
        """Return the token at each row of a site, int64 [rows]; arguments as for `compressed`."""
        return self._token_ids[self._site(hook, layer)]

    def numpy(self, hook: object, layer: int | None = None) -> np.ndarray:
        """Return one site's rows as an array; for the arguments see `compressed`.

        bfloat16, which numpy lacks, becomes float32 of the same values; other dtypes share the
        tensor's memory.
        """
        rows = self[hook] if layer is None else self[hook, layer]
        return (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()

    def to_dict(self) -> dict[tuple[str, int], torch.Tensor]:
        """Return a plain dict (hook, layer) -> tensor."""
        return {(s.hook, s.layer): self._row(s) for s in self}

    def save(self, path: str | PathLike) -> Path:
        """Write a safetensors file with tensors such as ``resid_post.10``.

        Each has its ``.positions`` and ``.token_ids`` beside it.

        Raises:
            WeirError: if the file, which it names, cannot be written.
        """
        path = Path(path)
        pieces = self.pieces()
        try:
            with atomic_write(path) as file:
                file.writelines(pieces)
        except (OSError, ValueError) as e:  # ValueError: the name contains a NUL
            raise WeirError(f"cannot write {path}: {getattr(e, 'strerror', None) or e}") from e
        return path

    def to_bytes(self) -> bytes:
        """Return the bytes that `save` writes."""
        return b"".join(self.pieces())

    def pieces(self) -> list[bytes | memoryview]:
        """Return the bytes that `save` writes, in few pieces.

        The safetensors library is not used because it holds the interpreter lock for every tensor;
        a server does this for each request beside its event loop.
        """
        sites = self.sites
        block = self._rows if isinstance(self._rows, SiteSlices) else None
        block = block if block is not None and list(block) == sites else None
        placed = sites
        if block is None:
            # Wide values come first, and integers before them, so that all are aligned.
            placed = sorted(sites, key=lambda site: -self._row(site).itemsize)
            rows = [self._row(site) for site in placed]
            shapes = [(tensor.dtype, tuple(tensor.shape)) for tensor in rows]
        else:
            shapes = [(block.rows.dtype, (len(block.rows), block.rows.shape[-1]))] * len(sites)
        if unsupported := {dtype for dtype, _ in shapes} - _CODES.keys():
            raise WeirError(f"rows of {', '.join(map(str, unsupported))} cannot be written; convert them first")
        if block is None:
            bodies = [codec.as_bytes(tensor.contiguous()).numpy() for tensor in rows]
        else:
            bodies = [block.together()]
        ids = [*_int64(self._positions, sites), *_int64(self._token_ids, sites)]
        more = tuple(self.stacked.to_metadata().items())
        header = _header(tuple(sites), tuple(placed), more, tuple(shapes), tuple(map(len, ids)))
        return [b"".join((header, *ids)), *(body.reshape(-1).data for body in bodies)]

    @classmethod
    def load(cls, path: str | PathLike) -> Activations:
        """Read what `save` has written.

        Files of the layout ``per_request`` contain checksums of their rows, which are compared.

        Raises:
            WeirError: if the file, which it names, is anything else or damaged.
        """
        try:
            with safe_open(path, framework="pt") as file:
                meta = file.metadata() or {}
                if meta.get("weir") != "1":
                    raise WeirError(f"{path} was not written by Activations.save")
                sites = [Site(hook, layer) for hook, layer in json.loads(meta["sites"])]
                rows, positions, token_ids = (
                    {s: file.get_tensor(f"{s.hook}.{s.layer}{suffix}") for s in sites} for suffix in _SUFFIXES
                )
                names = set(file.keys())
                for s in sites:
                    if (name := f"{s.hook}.{s.layer}.checksums") not in names:
                        continue
                    sums = file.get_tensor(name).numpy()
                    if not np.array_equal(checksums(codec.as_bytes(rows[s].flatten(1)).numpy()), sums):
                        raise WeirError(
                            f"{path} is damaged: rows of {s} do not match their checksums; restore the file"
                        )
                return cls(rows, positions, token_ids, stacked=Stacked.from_metadata(meta))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as e:
            if isinstance(e, WeirError):
                raise
            raise WeirError(f"cannot read {path}: {e}") from None

    def _site(self, key: object, layer: int | None = None) -> Site:
        if layer is not None:
            key = (key, layer)
        if isinstance(key, tuple) and len(key) == 2 and type(key[1]) is int and key in self._positions:
            return key  # type: ignore[return-value] # a plain pair equals the Site of these names
        site = parse_site(key)
        if site not in self._positions:
            have = ", ".join(map(str, list(self)[:8])) or "none"
            raise KeyError(f"{site} was not captured; captured: {have}")
        return site

    def _shared(self, by_site: Mapping[Site, torch.Tensor], name: str) -> torch.Tensor:
        """Return the tensor that all sites share, or raise WeirError."""
        tensors = list(by_site.values())
        if not tensors:
            return torch.zeros(0, dtype=torch.int64)
        if any(other is not tensors[0] and not torch.equal(tensors[0], other) for other in tensors[1:]):
            raise WeirError(f"the sites have rows at different positions; use .{name}_of(hook, layer)")
        return tensors[0]

    def _repr_html_(self) -> str:
        """Return a map of blocks by tokens for each hook point, or the tokens, coloured by the norms of the rows.

        Rows of a few values, such as products with directions, have their values instead.
        """
        groups: dict[tuple[str, bytes], list[Site]] = {}
        for site in self.sites[: notebook.MAX_ROWS]:
            groups.setdefault((site.hook, self._positions[site].numpy().tobytes()), []).append(site)
        parts = [self._map(hook, sites) for (hook, _), sites in groups.items()]
        note = notebook.left_out(len(self), min(len(self), notebook.MAX_ROWS), "sites")
        return notebook.result(repr(self), *parts, note)

    def _map(self, hook: str, sites: list[Site]) -> str:
        """Return the HTML of sites of one hook point with rows at the same positions."""
        limit = notebook.MAX_TOKENS if len(sites) == 1 else notebook.MAX_COLUMNS
        positions = self._positions[sites[0]]
        tokens = self.texts.at(positions[:limit].numpy(), self._token_ids[sites[0]][:limit].numpy())
        lines, label = {}, ""
        for site in sites:
            rows = self._row(site)[:limit].flatten(1).double()
            few = rows.shape[1] <= MAX_VALUES
            label = "value" if few else "norm of the row"
            numbers = rows.T if few else torch.linalg.vector_norm(rows, dim=1)[None]
            lines.update({f"{site}{f' {i}' if few and len(numbers) > 1 else ''}": x for i, x in enumerate(numbers)})
        if len(lines) == 1:
            (name,) = lines
            return notebook.coloured_text(tokens, lines[name].numpy(), f"{name}, {label}", len(positions))
        numbers = torch.stack(list(lines.values())).numpy()
        return notebook.heat_map(
            list(lines), tokens, numbers, f"{hook}, {label}", total=(len(lines), len(positions)), upwards=True
        )

    def __repr__(self) -> str:
        shapes = ", ".join(f"{s}: {list(self._row(s).shape)}" for s in self.sites[:4])
        return f"Activations({shapes}{', ...' if len(self) > 4 else ''})"


def _int64(by_site: Mapping[Site, torch.Tensor], sites: list[Site]) -> list[bytes]:
    """Return the bytes of each site's integers, which most sites share."""
    tensors = [by_site[site] for site in sites]
    distinct = {id(tensor): tensor for tensor in tensors}
    data = {key: tensor.numpy().astype(np.int64, copy=False).tobytes() for key, tensor in distinct.items()}
    return [data[id(tensor)] for tensor in tensors]


@functools.lru_cache(maxsize=64)
def _header(
    sites: tuple[Site, ...],
    placed: tuple[Site, ...],
    more: tuple[tuple[str, str], ...],
    shapes: tuple[tuple[torch.dtype, tuple[int, ...]], ...],
    lengths: tuple[int, ...],
) -> bytes:
    """Return the header of what `Activations.save` writes.

    It is cached, since many requests of a server have the same.

    Args:
        sites: the sites.
        placed: the same, in the order of their rows.
        more: entries of its metadata.
        shapes: dtype and shape of the rows of each of `placed`.
        lengths: bytes of each site's positions, and then of each site's token ids.
    """
    names = [f"{site.hook}.{site.layer}" for site in sites]
    integer_names = [f"{name}{suffix}" for suffix in _SUFFIXES[1:] for name in names]
    tensors = {name: ("I64", [size // 8], size) for name, size in zip(integer_names, lengths, strict=True)}
    for (hook, layer), (dtype, shape) in zip(placed, shapes, strict=True):
        tensors[f"{hook}.{layer}"] = (_CODES[dtype], list(shape), math.prod(shape) * dtype.itemsize)
    meta = {"weir": "1", "sites": json.dumps([list(s) for s in sites]), **dict(more)}
    return build_header(tensors, meta, checked=False)


_SUFFIXES = ("", ".positions", ".token_ids")
_CODES = {getattr(torch, name): code for name, code in (CODES | {"float64": "F64"}).items()}
