"""What a request gets back: its activations and the receipt that says what was really done."""

from __future__ import annotations

import functools
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
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
from vllm_weir.results.site_slices import SiteSlices, alone
from vllm_weir.schema.hooks import Site, parse_site

LENS_KEY = "residual_stream"


@dataclass(frozen=True)
class CompressedRows:
    """Compressed rows of one sequence.

    Attributes:
        header: how the records are to be read, see docs/reference/file-formats.md.
        records: site -> uint8 [rows, record_bytes].
        dtypes: site -> dtype of the decoded rows, by name.
    """

    header: dict[str, Any]
    records: Mapping[Site, torch.Tensor]
    dtypes: Mapping[Site, str]

    def __getstate__(self) -> dict[str, Any]:
        records = self.records
        if isinstance(records, dict):
            records = {site: alone(some) for site, some in records.items()}
        return {**self.__dict__, "records": records}

    def decode(self, site: Site) -> torch.Tensor:
        """[rows, d_model]."""
        return codec.decode(self.records[site], self.header).to(getattr(torch, self.dtypes[site]))


class Activations(Mapping):
    """Rows of one sequence by site: ``acts["resid_post", 10]`` is a tensor [rows, d_model] on the CPU.

    Rows come in ascending position. Keys are (hook, layer) pairs and whatever else names a site, see `parse_site`
    (``"resid_post.10"``, as receipts have it), and ``"residual_stream"`` (a tensor [layers, rows, d_model], blocks
    ascending) for requests that used vllm-lens's key.
    """

    def __init__(
        self,
        rows: Mapping[Site, torch.Tensor],
        positions: Mapping[Site, torch.Tensor],
        token_ids: Mapping[Site, torch.Tensor],
        lens_layers: tuple[int, ...] = (),
        packed: CompressedRows | None = None,
    ) -> None:
        self._rows = rows
        self._packed = packed
        self._made: dict[Any, torch.Tensor] = {}
        """Rows that have been looked at; a plain pair of names finds a Site's."""
        self._positions = positions
        self._token_ids = token_ids
        self._lens_layers = lens_layers

    def __getstate__(self) -> dict[str, Any]:
        rows = self._rows
        if isinstance(rows, dict):
            rows = {site: alone(some) for site, some in rows.items()}
        # Those of a block or a dict are the same memory once more.
        again = self._packed is None and isinstance(rows, (SiteSlices, dict))
        made = {} if again else {key: alone(some) for key, some in self._made.items()}
        return {**self.__dict__, "_rows": rows, "_made": made}

    @property
    def sites(self) -> list[Site]:
        """The captured sites, by block and then by place in the block."""
        return list(self._positions)

    def count(self, site: Site) -> int:
        """Rows of a captured site."""
        return len(self._positions[site])

    @property
    def is_compressed(self) -> bool:
        """Whether the rows were compressed on the device."""
        return self._packed is not None

    def compressed(self, hook: object, layer: int | None = None) -> tuple[torch.Tensor, dict[str, Any]]:
        """A site's rows as they left the device: (uint8 [rows, record_bytes], header that says how to read them).

        Args:
            hook, layer: a hook point and its block, or a site alone.

        Raises:
            WeirError: if the rows were not compressed.
        """
        packed = self._packed
        if packed is None:
            raise WeirError("these rows are not compressed; ask for Capture(..., compress=...)")
        return packed.records[self._site(hook, layer)], packed.header

    def __getitem__(self, key: object) -> torch.Tensor:
        try:
            return self._made[key]
        except (KeyError, TypeError):
            return self._first_look(key)

    def _first_look(self, key: object) -> torch.Tensor:
        if key == LENS_KEY and self._lens_layers:
            return torch.stack([self._row(Site("resid_post", layer)) for layer in self._lens_layers])
        return self._row(self._site(key))

    def _row(self, site: Site) -> torch.Tensor:
        """A site's rows, decoded when they are first asked for."""
        if site not in self._made:
            if self._packed is not None:
                self._made[site] = self._packed.decode(site)
            elif isinstance(self._rows, SiteSlices):
                self._made = self._rows.every
            else:  # rows may be read from a file when they are looked at
                self._made[site] = self._rows[site]
        return self._made[site]

    def __iter__(self) -> Iterator[Site]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)

    def __contains__(self, key: object) -> bool:
        if key == LENS_KEY:
            return bool(self._lens_layers)
        try:
            return parse_site(key) in self._positions
        except WeirError:
            return False

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the rows, int64 [rows], ascending; raises WeirError if the sites do not share their rows."""
        return self._shared(self._positions, "positions")

    @property
    def token_ids(self) -> torch.Tensor:
        """Token at each row's position, int64 [rows]; raises WeirError if the sites do not share their rows."""
        return self._shared(self._token_ids, "token_ids")

    def positions_of(self, hook: object, layer: int | None = None) -> torch.Tensor:
        """Positions of one site's rows, int64 [rows]; named as for `compressed`."""
        return self._positions[self._site(hook, layer)]

    def token_ids_of(self, hook: object, layer: int | None = None) -> torch.Tensor:
        """Token at each of one site's rows, int64 [rows]; named as for `compressed`."""
        return self._token_ids[self._site(hook, layer)]

    def numpy(self, hook: object, layer: int | None = None) -> np.ndarray:
        """One site's rows as an array [rows, d_model]; named as for `compressed`.

        bfloat16, which numpy lacks, becomes the equal float32; of every other dtype it is the tensor's own memory.
        """
        rows = self[hook] if layer is None else self[hook, layer]
        return (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()

    def to_dict(self) -> dict[tuple[str, int], torch.Tensor]:
        """Plain dict (hook, layer) -> tensor."""
        return {(s.hook, s.layer): self._row(s) for s in self}

    def save(self, path: str | PathLike) -> Path:
        """Write a safetensors file: ``resid_post.10`` beside its ``.positions`` and ``.token_ids``.

        Raises:
            WeirError: naming the file, if it cannot be written.
        """
        path = Path(path)
        temporary = path.parent / f".weir-{secrets.token_hex(8)}"
        pieces = self.pieces()
        try:
            with open(temporary, "xb") as file:
                file.writelines(pieces)
            os.replace(temporary, path)  # whoever has mapped the older file keeps it
        except (OSError, ValueError) as e:  # the latter for a NUL in the name
            raise WeirError(f"cannot write {path}: {getattr(e, 'strerror', None) or e}") from e
        finally:
            with suppress(OSError, ValueError):  # it has its own name by now, or could not be made
                temporary.unlink()
        return path

    def to_bytes(self) -> bytes:
        """What `save` writes."""
        return b"".join(self.pieces())

    def pieces(self) -> list[bytes | memoryview]:
        """What `save` writes, in few pieces.

        A server makes one file for each request beside its event loop, and the safetensors library would hold the
        interpreter for 20 us a tensor.
        """
        sites = self.sites
        block = self._rows if isinstance(self._rows, SiteSlices) and list(self._rows) == sites else None
        if block is None:
            rows = [self._row(site) for site in sites]
            shapes = [(some.dtype, tuple(some.shape)) for some in rows]
        else:
            shapes = [(block.rows.dtype, (len(block.rows), block.rows.shape[-1]))] * len(sites)
        if other := {dtype for dtype, _ in shapes} - _CODES.keys():
            raise WeirError(f"rows of {', '.join(map(str, other))} cannot be written; convert them first")
        if block is None:
            bodies = [codec.as_bytes(some.contiguous()).numpy() for some in rows]
        else:
            bodies = [block.together()]
        # First, so that everything lies on a word's boundary.
        ids = [*_int64(self._positions, sites), *_int64(self._token_ids, sites)]
        start = _start(tuple(sites), tuple(self._lens_layers), tuple(shapes), tuple(map(len, ids)))
        return [b"".join((start, *ids)), *(body.reshape(-1).data for body in bodies)]

    @classmethod
    def load(cls, path: str | PathLike) -> Activations:
        """Read what `save` wrote; raises WeirError naming the file if it is anything else, or damaged.

        Files of the layout ``per_request`` have checksums of their rows, which are compared.
        """
        try:
            with safe_open(path, framework="pt") as file:
                meta = file.metadata() or {}
                if meta.get("weir") != "1":
                    raise WeirError(f"{path} was not written by Activations.save")
                sites = [Site(hook, layer) for hook, layer in json.loads(meta["sites"])]
                rows, positions, token_ids = (
                    {s: file.get_tensor(f"{s.hook}.{s.layer}{end}") for s in sites} for end in _ENDS
                )
                names = set(file.keys())
                for s in sites:
                    if (name := f"{s.hook}.{s.layer}.checksums") not in names:
                        continue
                    sums = file.get_tensor(name).numpy()
                    if not np.array_equal(checksums(codec.as_bytes(rows[s]).numpy()), sums):
                        raise WeirError(f"{path} is damaged: rows of {s} do not fit their checksums; restore it")
                return cls(rows, positions, token_ids, tuple(json.loads(meta["lens"])))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as e:
            if isinstance(e, WeirError):
                raise
            raise WeirError(f"cannot read {path}: {e}") from None

    def _site(self, key: object, layer: int | None = None) -> Site:
        if layer is not None:
            key = (key, layer)
        if isinstance(key, tuple) and len(key) == 2 and type(key[1]) is int and key in self._positions:
            return key  # type: ignore[return-value] # a Site is a pair, so a pair of the plain names finds it
        site = parse_site(key)
        if site not in self._positions:
            have = ", ".join(map(str, list(self)[:8])) or "none"
            raise KeyError(f"{site} was not captured; captured: {have}")
        return site

    def _shared(self, by_site: Mapping[Site, torch.Tensor], name: str) -> torch.Tensor:
        every = list(by_site.values())
        if not every:
            return torch.zeros(0, dtype=torch.int64)
        if any(other is not every[0] and not torch.equal(every[0], other) for other in every[1:]):
            raise WeirError(f"the sites have different rows; use .{name}_of(hook, layer)")
        return every[0]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{s}: {list(self._row(s).shape)}" for s in self.sites[:4])
        return f"Activations({shapes}{', ...' if len(self) > 4 else ''})"


def _int64(by_site: Mapping[Site, torch.Tensor], sites: list[Site]) -> list[bytes]:
    """Each site's integers; most sites share theirs."""
    tensors = [by_site[site] for site in sites]
    own = {id(some): some for some in tensors}
    made = {number: some.numpy().astype(np.int64, copy=False).tobytes() for number, some in own.items()}
    return [made[id(some)] for some in tensors]


@functools.lru_cache(maxsize=64)
def _start(
    sites: tuple[Site, ...],
    lens_layers: tuple[int, ...],
    shapes: tuple[tuple[torch.dtype, tuple[int, ...]], ...],
    lengths: tuple[int, ...],
) -> bytes:
    """The header of what `Activations.save` writes; many requests of a server have the same.

    Args:
        shapes: dtype and shape of each site's rows.
        lengths: bytes of each site's positions, and then of each site's token ids.
    """
    names = [f"{site.hook}.{site.layer}" for site in sites]
    ends = [f"{name}{end}" for end in _ENDS[1:] for name in names]
    tensors = {name: ("I64", [size // 8], size) for name, size in zip(ends, lengths, strict=True)}
    for name, (dtype, shape) in zip(names, shapes, strict=True):
        tensors[name] = (_CODES[dtype], list(shape), math.prod(shape) * dtype.itemsize)
    meta = {"weir": "1", "sites": json.dumps([list(s) for s in sites]), "lens": json.dumps(lens_layers)}
    return build_header(tensors, meta, checked=False)


_ENDS = ("", ".positions", ".token_ids")
_CODES = {getattr(torch, name): code for name, code in (CODES | {"float64": "F64"}).items()}
