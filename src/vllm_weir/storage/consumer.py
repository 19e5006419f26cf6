"""The consumers ``filesystem`` and ``npz``, which write rows in a layout of this package."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from vllm_weir.consumers.base import Consumer, EngineInfo, Finished, Rows
from vllm_weir.errors import WeirError
from vllm_weir.schema.capture import ROW_NOTES_KEY
from vllm_weir.storage.batch import Batch
from vllm_weir.storage.layouts.site_tensors import safe_name
from vllm_weir.storage.loading import open_writer

FILE_PER_SEQUENCE = ("per_request", "npz")
"""Layouts in which each sequence has files of its own, published when it finishes."""
IDS = ("unique", "caller")
"""Values of the option `ids`."""


class Filesystem(Consumer):
    """A consumer that writes rows, or records of compressed rows, to files.

    Args:
        url: directory, or any fsspec URL.
        layout: see docs/guides/keep.md.
        flush_seconds: least time between two publications of finished sequences; by default 0 for
            layouts with files for each sequence, and 10 for the others. `weir.flush` and closing
            the engine publish everything.
        ids: what a sequence is called in the dataset: ``"unique"``, the engine's own id (the
            caller's and a random suffix), or ``"caller"``, the caller's (with ``.1`` and so on for
            further sequences of a request), which can be written only once.
        options: of the layout, and ``fsync``, ``storage_options``, see docs/guides/keep.md.
    """

    required = True

    def __init__(
        self,
        url: str | None = None,
        layout: str = "per_request",
        flush_seconds: float | None = None,
        ids: str = "unique",
        **options: Any,
    ) -> None:
        if not isinstance(url, str) or not url:
            raise WeirError("expected where the files go: a directory or an fsspec URL", "url")
        if not isinstance(layout, str):
            raise WeirError("expected the name of a layout", "layout")
        if flush_seconds is None:
            flush_seconds = 0.0 if layout in FILE_PER_SEQUENCE else 10.0
        if isinstance(flush_seconds, bool) or not isinstance(flush_seconds, (int, float)) or not flush_seconds >= 0:
            raise WeirError("expected a number of seconds, at least 0", "flush_seconds")
        if ids not in IDS:
            raise WeirError(f"choose from {', '.join(IDS)}", "ids")
        self._url, self._layout, self._options, self._ids = url, layout, options, ids
        self._flush_seconds, self._published_at, self._unpublished = flush_seconds, time.monotonic(), False
        self._writer: Any = None
        self._writing = ""
        """The sequence that is being written, which `abort` may undo."""

    def open(self, engine: EngineInfo) -> None:
        try:
            self._writer = open_writer(self._url, self._layout, **self._options)
        except TypeError as e:
            raise WeirError(f"an option is wrong: {e}") from None

    def take(self, rows: Rows) -> None:
        site, name = rows.site, self._begin(rows.request)
        self._writer.write(
            Batch(name, site.hook, site.layer, rows.positions, rows.token_ids, rows.data, rows.compression)
        )

    def finish(self, request: Finished) -> Sequence[str]:
        name = self._begin(request)
        metadata = {
            "request_id": request.request_id,
            "index": request.index,
            "prompt_tokens": request.prompt_tokens,
            "generated_tokens": request.generated_tokens,
            "finish_reason": request.finish_reason,
        }
        if request.capture:
            metadata[ROW_NOTES_KEY] = [dict(entry) for entry in request.capture]
        if request.metadata:
            metadata["mark"] = dict(request.metadata)
        self._writer.finish_request(name, metadata)
        self._writer.settle(name)  # so that a full disk fails this request
        self._unpublished = True
        if not self._flush_seconds:
            self._publish()
        self._writing = ""
        return self._files(name)

    def abort(self, request: Finished) -> None:
        if self._writing:  # otherwise the name is that of a complete sequence
            self._writer.abandon(self._writing)
        self._writing = ""

    def pending(self, request: Finished) -> bool:
        return self._writer.pending(self._name(request))

    def tick(self) -> None:
        if self._unpublished and time.monotonic() - self._published_at >= self._flush_seconds:
            self._publish()

    def flush(self) -> None:
        self._publish(join=True)

    def close(self) -> None:
        try:
            self._writer.close()
        finally:
            self._writer.discard()  # does nothing, unless closing failed

    def _publish(self, join: bool = False) -> None:
        self._published_at = time.monotonic()
        self._writer.flush(join=join)
        self._unpublished = False

    def _begin(self, request: Finished) -> str:
        name = self._name(request)
        if not self._writing and not self._writer.holds(name):
            self._writing = name
        return name

    def _name(self, request: Finished) -> str:
        if self._ids == "unique":
            return request.name
        name = f"{request.request_id}.{request.index}" if request.index else request.request_id
        return f"{name}.{request.part}" if request.part else name

    def _files(self, name: str) -> list[str]:
        store = self._writer.store
        return [store.describe(f"{safe_name(name)}.safetensors") if self._layout == "per_request" else self._url]


class Npz(Filesystem):
    """`Filesystem` with the layout ``npz``; takes its other options."""

    def __init__(self, url: str | None = None, **options: Any) -> None:
        if "layout" in options:
            raise WeirError("is always npz here; the consumer 'filesystem' has others", "layout")
        super().__init__(url, "npz", **options)
