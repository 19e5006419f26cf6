"""Sources of texts at any fsspec URL: JSONL, Parquet, plain text and saved HF datasets.

A source numbers its records from 0 in a fixed order, and has a digest of its bytes, which tells a
resumed run that it reads the same texts.
"""

from __future__ import annotations

import hashlib
import io
import json
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any

import pyarrow as pa

from vllm_weir.errors import WeirError
from vllm_weir.extraction.readers import READERS, InputFile, Lines, Tables, kind_of
from vllm_weir.storage.atomic_file import split_url, store_errors
from vllm_weir.storage.object_store import ObjectStore

BLOCK = 4 << 20
"""Files are read and digested in blocks of this many bytes."""


@dataclass(frozen=True)
class InputRecord:
    """One record."""

    index: int  # its number in the source
    # the text, its token ids, or a chat (a list of messages); None for an invalid record
    value: str | list[int] | list[dict[str, Any]] | None
    reason: str = ""  # Why the record is invalid, naming the file and line; else empty


@dataclass(frozen=True)
class TextSource:
    """Records of one or more files. Made by `open_source`; may be pickled.

    Attributes:
        store, kind, parts: The files.
        column: Column of the text.
        digest: Digest of the files' names and bytes, hexadecimal.
    """

    store: ObjectStore
    kind: str
    parts: tuple[InputFile, ...]
    column: str
    digest: str

    def __len__(self) -> int:
        return sum(part.records for part in self.parts)

    def read(self, start: int, stop: int) -> Iterator[InputRecord]:
        """Yield records `start` to `stop` - 1, in order."""
        first = 0
        for part in self.parts:
            part_start, part_stop = max(start - first, 0), min(stop - first, part.records)
            if part_start < part_stop:
                yield from self._read_part(part, first, part_start, part_stop)
            first += part.records

    def _read_part(self, part: InputFile, first: int, start: int, stop: int) -> Iterator[InputRecord]:
        file = self.store.describe(part.name)
        with store_errors("read", file):
            try:
                found = READERS[self.kind].read(self.store, part, start, stop, self.column)
                for i, (number, raw) in enumerate(found, first + start):
                    yield _record(i, raw, f"{file}, {READERS[self.kind].unit} {number}", self.column)
            except (pa.ArrowException, KeyError, EOFError) as e:
                raise WeirError(f"cannot read {file}: {str(e)[:200]}", "source") from e


def open_source(
    url: str | PathLike,
    column: str = "text",
    *,
    split: str | None = None,
    storage_options: dict[str, Any] | None = None,
) -> TextSource:
    """Open the texts in a file or folder, which is read once to digest it and count records.

    Args:
        url: ``.jsonl`` (``.ndjson``, ``.json`` with one object a line), ``.parquet``, ``.txt`` (one
            text a line), any of the line formats with ``.gz``, a folder of files of one of these
            kinds, or a folder of ``Dataset.save_to_disk``; a local path or any fsspec URL. Blank
            lines are no records.
        column: Column of the text. A record is a chat if its value is a list of messages, or if it
            lacks this column and has a column ``messages``. A list of ints is the tokens of the prompt.
        split: Split of a saved ``DatasetDict``.
        storage_options: Options for fsspec.
    """
    store = ObjectStore(url, storage_options)
    if store.is_file():
        parent, name = split_url(store.url)
        store = ObjectStore(parent, storage_options)
        names = [name]
    else:
        if not store.exists():
            raise WeirError(
                f"{store.url} does not exist; for a dataset on the Hugging Face hub, name a file "
                "(hf://datasets/OWNER/NAME/FILE), or save it with save_to_disk and name that folder",
                "source",
            )
        store, names = _folder_files(store, split, storage_options)
    kind_by_name = {name: kind_of(name) for name in names}
    kinds = {kind for kind in kind_by_name.values() if kind}
    if len(kinds) != 1:
        problem = f"holds files of several kinds ({', '.join(sorted(kinds))}); name one" if kinds else "holds no texts"
        raise WeirError(f"{store.url} {problem}; JSONL, Parquet, .txt and saved HF datasets are read", "source")
    kind = kinds.pop()
    digest, parts = hashlib.blake2b(digest_size=16), []
    # A saved dataset has an order of its own.
    for name in names if kind == "arrow" else sorted(names):
        if kind_by_name[name]:
            parts.append(_scan(store, name, kind, digest, column))
    return TextSource(store, kind, tuple(parts), column, digest.hexdigest())


class _Digested(io.RawIOBase):
    """A file whose bytes are added to a digest as they are read."""

    def __init__(self, stream: Any, digest: Any) -> None:
        self._stream, self._digest, self.size = stream, digest, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self._digest.update(data)
        self.size += len(data)
        return len(data)


def _scan(store: ObjectStore, name: str, kind: str, digest: Any, column: str) -> InputFile:
    """Add a file to the digest, and count its records."""
    file = store.describe(name)
    reader = READERS[kind]
    with store_errors("read", file):
        try:
            with store.open(name) as opened:
                digested = _Digested(opened, digest)
                stream = io.BufferedReader(digested, BLOCK)
                part = reader.count_lines(stream, name) if isinstance(reader, Lines) else None
                while stream.read(BLOCK):
                    pass
        except EOFError as e:
            raise WeirError(f"cannot read {file}: {e}", "source") from e
        digest.update(json.dumps([posixpath.basename(name), digested.size]).encode())
        try:
            if isinstance(reader, Tables):
                part = InputFile(name, reader.count(store, name, column))
        except (pa.ArrowException, EOFError, OSError) as e:
            raise WeirError(f"cannot read {file}: {str(e)[:200]}", "source") from e
        assert part is not None
        if part.blank:  # earlier versions numbered records otherwise
            digest.update(b"without blank lines")
        return part


def _folder_files(
    store: ObjectStore, split: str | None, options: dict[str, Any] | None
) -> tuple[ObjectStore, list[str]]:
    """Return the files of a folder, or of a saved HF dataset in its order."""
    names = list(store.names())
    if "dataset_dict.json" in names:
        splits = list(_json(store, "dataset_dict.json").get("splits", []))
        if split is None and len(splits) == 1:
            split = splits[0]
        if split not in splits:
            raise WeirError(f"{store.url} has the splits {', '.join(map(str, splits))}; name one", "split")
        store = ObjectStore(f"{store.url.rstrip('/')}/{split}", options)
        names = list(store.names())
    elif split is not None:
        raise WeirError(f"{store.url} is not a saved DatasetDict; leave split out", "split")
    if "state.json" in names:
        try:
            files = [str(entry["filename"]) for entry in _json(store, "state.json")["_data_files"]]
        except (KeyError, TypeError):
            raise store.error("state.json", "does not list the dataset's files") from None
        for missing in [file for file in files if file not in names]:
            raise store.error(missing, "is missing, although state.json names it")
        return store, files
    return store, names


def _json(store: ObjectStore, name: str) -> dict[str, Any]:
    data = store.read(name)
    try:
        value = json.loads(data)
    except ValueError as e:
        raise store.error(name, f"is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise store.error(name, "is not a JSON object")
    return value


def _record(index: int, raw: Any, where: str, column: str) -> InputRecord:
    """Make a record of a raw value, or of the exception that a reader returned for it."""
    if isinstance(raw, Exception):
        return InputRecord(index, None, f"{where}: {raw}")
    if isinstance(raw, str):
        return InputRecord(index, raw) if raw.strip() else InputRecord(index, None, f"{where}: the text is empty")
    if isinstance(raw, list) and raw:
        if all(type(token) is int and token >= 0 for token in raw):
            return InputRecord(index, raw)
        if all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in raw):
            return InputRecord(index, raw)
        return InputRecord(index, None, f"{where}: a chat is a list of messages with role and content")
    found = "an empty list" if raw == [] else "nothing" if raw is None else f"a {type(raw).__name__}"
    return InputRecord(index, None, f"{where}: column {column!r} holds {found}, not a text or a list of messages")
