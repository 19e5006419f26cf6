"""`ReadOut`: ids and values that are read off the rows of one hook point, and how they lie in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_weir.schema.hooks import Site

FEATURES, LENS = "features", "lens"
ITEM = 4
"""Bytes of an id (int32), and of a value (float32)."""


@dataclass(frozen=True)
class ReadOut:
    """What is read off each row of a site.

    Attributes:
        kind: ``"features"`` of a sparse autoencoder, or the tokens of a ``"lens"``.
        site: whose rows are read, after interventions.
        key: names the autoencoder on the workers, or the directory of a tuned lens; "" for the
            logit lens.
        top_k: how many of the largest values; 0 if there are `ids`.
        ids: the features whose values are read instead.
    """

    kind: str
    site: Site
    key: str
    top_k: int
    ids: tuple[int, ...] = ()

    @property
    def record_bytes(self) -> int:
        """Bytes of one row's ids and values; chosen ids are known, so only their values are sent."""
        return ITEM * len(self.ids) if self.ids else 2 * ITEM * self.top_k

    @property
    def width(self) -> int:
        return len(self.ids) or self.top_k

    def to_wire(self) -> list[Any]:
        return [self.kind, *self.site, self.key, self.top_k, list(self.ids)]

    @classmethod
    def from_wire(cls, data: Sequence[Any]) -> ReadOut:
        kind, hook, layer, key, top_k, ids = data
        return cls(kind, Site(hook, layer), key, top_k, tuple(ids))


class RecordLayout(NamedTuple):
    """Where the read-outs of a request lie in the records of its rows.

    Every row of the ring has a record of one size. The read-outs of a site follow each other in the
    record of its row's first row of the ring.

    Attributes:
        record_bytes: of each record.
        offsets: byte of each read-out's ids, or of its values if its ids are chosen.
    """

    record_bytes: int
    offsets: Mapping[ReadOut, int]

    @classmethod
    def of(cls, read_outs: Iterable[ReadOut], row_bytes: int = 0) -> RecordLayout:
        """Lay out the read-outs of a request, behind a row of `row_bytes` bytes; 0 if the rows are not sent."""
        first = -(-row_bytes // ITEM) * ITEM
        sizes: dict[Site, int] = {}
        offsets: dict[ReadOut, int] = {}
        for read_out in read_outs:
            if read_out not in offsets:
                offsets[read_out] = sizes.get(read_out.site, first)
                sizes[read_out.site] = offsets[read_out] + read_out.record_bytes
        return cls(max(sizes.values(), default=first), offsets)


class SAEInfo(NamedTuple):
    """A sparse autoencoder that an engine has loaded.

    Attributes:
        name: under which requests name it.
        site: the hook point that it reads.
        d_sae: its features.
        architecture: SAELens's name of it.
        bytes: of its weights, on each worker.
        labels: what features stand for, {feature: text}.
        layers: blocks of a cross-layer transcoder, each with `d_sae` features, `site` being that of the
            first; empty for everything else.
    """

    name: str
    site: Site
    d_sae: int
    architecture: str
    bytes: int
    labels: Mapping[int, str] = {}
    layers: tuple[int, ...] = ()
