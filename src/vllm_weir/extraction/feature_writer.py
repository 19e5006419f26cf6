"""`FeatureWriter`: features of records, as parts of a `FeatureDataset`."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.extraction.run_spec import record_of
from vllm_weir.storage.features.dataset import FeatureInfo
from vllm_weir.storage.features.parts import (
    INFO,
    LAYOUT,
    RecordFeatures,
    open_part,
    part_name,
    part_names,
    read_group,
    records_of,
    records_without_rows,
    to_parquet,
)
from vllm_weir.storage.layouts.base import claim
from vllm_weir.storage.object_store import ObjectStore

PART_BYTES = 64 << 20
"""A part is published once its records take so many bytes in memory."""


@dataclass(frozen=True, eq=False)
class FeatureBatch:
    """The features of one request; its record is that of the request's id."""

    request_id: str
    features: RecordFeatures

    @property
    def row_count(self) -> int:
        return len(self.features)

    @property
    def nbytes(self) -> int:
        """Bytes of ids and values, as they are stored before compression."""
        return 8 * len(self.features.ids)


class FeatureWriter:
    """A writer of features into a new or an existing dataset.

    A record is part of the dataset when it is finished *and* flushed: by `flush`, by `close`, or
    because enough rows have come together. What is not yet published stays in memory, so that it
    can be tried again after an error such as a full disk.

    `part_bytes`: a part is published once its records take so many bytes in memory.
    """

    def __init__(self, store: ObjectStore, info: FeatureInfo, part_bytes: int = PART_BYTES) -> None:
        if isinstance(part_bytes, bool) or not isinstance(part_bytes, int) or part_bytes < 1:
            raise WeirError(f"expected a number of bytes, at least 1, got {brief(part_bytes)}", "shard_bytes")
        self.store, self.part_bytes = store, part_bytes
        store.make_folder()
        claim(store, LAYOUT)
        store.sweep()
        parts = part_names(list(store.names()))
        if not parts:  # what is there may be of a run that was killed when it had just begun
            store.put(INFO, (json.dumps(info.to_json(), indent=1) + "\n").encode())
        # Names sort by time and are distinct from those of other writers.
        self._name = f"{time.time_ns():016x}{secrets.token_hex(4)}"
        self._count = 0
        self._begun: dict[str, RecordFeatures] = {}
        self._finished: list[RecordFeatures] = []
        self._bytes = 0
        self._held: set[int] = set()
        for name in parts:
            self._held |= _records_in(store, name)

    def holds(self, request_id: str) -> bool:
        return record_of(request_id) in self._held

    def write(self, batch: FeatureBatch) -> None:
        self._begun[batch.request_id] = replace(batch.features, record=record_of(batch.request_id))

    def finish_request(self, request_id: str, metadata: Mapping[str, Any] | None = None) -> None:
        """Declare a request complete; publish a part if there is enough for one."""
        features = self._begun.pop(request_id)
        self._finished.append(features)
        self._held.add(features.record)
        self._bytes += features.nbytes
        if self._bytes >= self.part_bytes:
            self.flush()

    def flush(self) -> None:
        """Publish finished records; after an error it can be tried again."""
        if not self._finished:
            return
        file = self.store.new_file(part_name(self._name, self._count))
        try:
            file.write(to_parquet(self._finished))
            file.publish()
        except BaseException:
            file.discard()
            raise
        self._count += 1
        self._finished, self._bytes = [], 0

    def tidy(self) -> None:
        """Flush, and drop records that an earlier part has, which workers of Ray may have written twice.

        To be called when no other writer is at work.
        """
        self.flush()
        seen: set[int] = set()
        for name in part_names(list(self.store.names())):
            records = _records_in(self.store, name)
            if repeated := records & seen:
                self._drop(name, repeated)
            seen |= records

    def _drop(self, name: str, repeated: set[int]) -> None:
        with open_part(self.store, name) as part:
            groups = [records_of(read_group(part, group)) for group in range(part.num_row_groups)]
            groups.append([RecordFeatures.without_rows(record) for record in records_without_rows(part)])
        kept = [record for group in groups for record in group if record.record not in repeated]
        if kept:
            file = self.store.new_file(name)
            file.write(to_parquet(kept))
            file.publish()
        else:
            self.store.remove(name)

    def close(self) -> None:
        self.flush()

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        try:
            self.flush()  # finished records are complete, whatever went wrong later
        except (WeirError, OSError) as e:
            error.add_note(f"finished records could not be published either: {e}")


def _records_in(store: ObjectStore, name: str) -> set[int]:
    found: set[int] = set()
    with open_part(store, name) as part:
        found.update(records_without_rows(part))
        for group in range(part.num_row_groups):
            found.update(np.unique(read_group(part, group, ["record"])["record"].to_numpy()).tolist())
    return found
