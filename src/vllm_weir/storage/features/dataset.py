"""`FeatureDataset`: features of a dataset of texts, as ``weir extract --sae`` wrote them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import pyarrow as pa

from vllm_weir.errors import MissingFile, WeirError, brief
from vllm_weir.schema.fields import is_int, plain
from vllm_weir.schema.hooks import Site
from vllm_weir.storage.features.parts import (
    FORMAT,
    INFO,
    LAYOUT,
    VERSION,
    RecordFeatures,
    open_part,
    part_names,
    read_group,
    records_of,
    records_without_rows,
    run_starts,
)
from vllm_weir.storage.layouts.base import MARKER, read_marker
from vllm_weir.storage.object_store import ObjectStore

_NO_GROUP = -1
"""Row group of records without rows."""


@dataclass(frozen=True)
class FeatureInfo:
    """Which autoencoder a dataset's features are of, and which of them it holds.

    Attributes:
        sae: its name.
        site: the hook point that it reads.
        d_sae: its features.
        cfg: its configuration, as SAELens writes it.
        digest: of its configuration and weights, hexadecimal.
        model: the model that read the texts.
        top_k: at most so many features of each row, the most active ones; None if `ids` are given.
        ids: the chosen features; None for the most active ones.
    """

    sae: str
    site: Site
    d_sae: int
    cfg: Mapping[str, Any]
    digest: str
    model: str
    top_k: int | None
    ids: tuple[int, ...] | None

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``features.json``."""
        return {
            "format": FORMAT, "version": VERSION, "sae": self.sae, "site": {"hook": self.site.hook,
            "layer": self.site.layer}, "d_sae": self.d_sae, "digest": self.digest, "model": self.model,
            "top_k": self.top_k, "ids": None if self.ids is None else list(self.ids), "cfg": dict(self.cfg),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Any) -> FeatureInfo:
        """Parse the content of ``features.json``; raise ValueError, KeyError or TypeError if it is none."""
        if data["format"] != FORMAT or data["version"] != VERSION:
            raise ValueError
        ids = None if data["ids"] is None else tuple(map(int, data["ids"]))
        site = Site(str(data["site"]["hook"]), int(data["site"]["layer"]))
        return cls(
            str(data["sae"]), site, int(data["d_sae"]), dict(data["cfg"]), str(data["digest"]), str(data["model"]),
            data["top_k"], ids,
        )  # fmt: skip


class FeatureDataset:
    """Features of the records of a dataset; made by `load_features`.

    ``dataset[record]`` are the `RecordFeatures` of a record, by its number in the source. The index
    takes 32 bytes a record; features are read when they are asked for, a row group at a time.

    Attributes:
        url: where it is.
        info: which autoencoder they are of.
        records: the records that it has, int64, ascending.
        rows: number of rows of all of them.
    """

    def __init__(self, store: ObjectStore, url: str) -> None:
        self.url, self._store = url, store
        self.info = read_info(store)
        self._parts = part_names(list(store.names()))
        # Of a record that two writers have finished, as workers of Ray may, the first one's rows count.
        runs = np.concatenate([_runs_of(store, name, i) for i, name in enumerate(self._parts)] or [np.zeros((0, 4))])
        runs = runs.astype(np.int64)
        self.records, first = np.unique(runs[:, 0], return_index=True)
        self._part_of, self._group_of, counts = runs[first, 1:].T
        self._has_repeated = len(runs) > len(self.records)
        self.rows = int(counts.sum())
        self._cached: tuple[tuple[int, int], dict[int, RecordFeatures]] = ((-1, -1), {})

    def __len__(self) -> int:
        return len(self.records)

    def __contains__(self, record: object) -> bool:
        return is_int(plain(record)) and bool(np.isin(plain(record), self.records))

    def __getitem__(self, record: int) -> RecordFeatures:
        record = plain(record)
        if record not in self:
            raise WeirError(f"{self.url} has no record {brief(record)}; it has {len(self):,} records", "record")
        index = int(np.searchsorted(self.records, record))
        where = int(self._part_of[index]), int(self._group_of[index])
        if where[1] == _NO_GROUP:
            return RecordFeatures.without_rows(int(record))
        if self._cached[0] != where:
            with open_part(self._store, self._parts[where[0]]) as part:
                found = records_of(read_group(part, where[1]))
            self._cached = where, {one.record: one for one in found}
        return self._cached[1][record]

    def __iter__(self) -> Iterator[RecordFeatures]:
        """Yield all records, in the order in which they are stored; at last those without rows."""
        for table in self.tables():
            yield from records_of(table)
        for record in self.records[self._group_of == _NO_GROUP]:
            yield RecordFeatures.without_rows(int(record))

    def __repr__(self) -> str:
        info = self.info
        return f"FeatureDataset({info.sae} at {info.site}, {len(self):,} records, {self.rows:,} rows)"

    def tables(self) -> Iterator[pa.Table]:
        """Yield everything as Arrow tables of the columns of the files, each of at least one record."""
        for i, name in enumerate(self._parts):
            with open_part(self._store, name) as part:
                for group in range(part.num_row_groups):
                    table = read_group(part, group)
                    if self._has_repeated:
                        mine = self.records[(self._part_of == i) & (self._group_of == group)]
                        table = table.filter(pa.array(np.isin(table["record"].to_numpy(), mine)))
                    if len(table):
                        yield table


def _runs_of(store: ObjectStore, name: str, part: int) -> np.ndarray:
    """Return each record of a part, int64 [records, 4]: record, part, row group or `_NO_GROUP`, rows."""
    runs = [np.zeros((0, 4), np.int64)]
    with open_part(store, name) as file:
        runs += [np.array([[record, part, _NO_GROUP, 0]]) for record in records_without_rows(file)]
        for group in range(file.num_row_groups):
            records = read_group(file, group, ["record"])["record"].to_numpy()
            starts = np.array(run_starts(records), np.int64)
            counts = np.diff(np.append(starts, len(records)))
            runs.append(np.stack([records[starts], np.full_like(starts, part), np.full_like(starts, group), counts], 1))
    return np.concatenate(runs)


def read_info(store: ObjectStore) -> FeatureInfo:
    data = store.read(INFO)
    try:
        return FeatureInfo.from_json(json.loads(data))
    except (ValueError, KeyError, TypeError):
        raise store.error(INFO, "does not describe features; write them again with `weir extract --sae`") from None


def load_features(url: str | PathLike, *, storage_options: dict[str, Any] | None = None) -> FeatureDataset:
    """Open features that ``weir extract --sae`` wrote.

    Args:
        url: the folder: a local path or any fsspec URL.
        storage_options: options for fsspec.

    Raises:
        MissingFile: if there is nothing at the URL.
        WeirError: if it holds no features, or a file is damaged; it names the file.
    """
    store = ObjectStore(url, storage_options)
    names = store.names()
    if MARKER not in names:
        if not store.exists():
            raise MissingFile(f"{url} does not exist")
        raise WeirError(f"{url} holds no features; `weir extract --sae NAME=PATH` writes them")
    layout = read_marker(store)
    if layout != LAYOUT:
        raise WeirError(f"{url} is a dataset of layout {layout!r}, which weir.load opens; it holds no features")
    return FeatureDataset(store, str(url))
