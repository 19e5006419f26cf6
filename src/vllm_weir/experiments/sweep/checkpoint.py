"""`Checkpoint`: an append-only file of the numbers that a sweep has computed.

The first line says which plan they belong to. Each further line is one number::

    <key> <value as hexadecimal float> <CRC-32 of the rest of the line>

A process that is killed leaves at most one line unfinished, the last; it is cut off when the file is
opened again.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import zlib
from collections.abc import Mapping
from types import TracebackType
from typing import BinaryIO

from vllm_weir.errors import WeirError

FORMAT, VERSION = "weir sweep", 1
_LINE = re.compile(rb"(\d+) (\S+) ([0-9a-f]{8})")


def encode_header(plan: str, keys: int) -> bytes:
    return json.dumps({"format": FORMAT, "version": VERSION, "plan": plan, "keys": keys}).encode() + b"\n"


def encode_value(key: int, value: float) -> bytes:
    body = b"%d %s" % (key, float(value).hex().encode())
    return b"%s %08x\n" % (body, zlib.crc32(body))


def decode_value(line: bytes) -> tuple[int, float] | None:
    """Return the key and number of a line without its end; None for one that is damaged."""
    match = _LINE.fullmatch(line)
    if match is None or zlib.crc32(line[: match.start(3) - 1]) != int(match[3], 16):
        return None
    try:
        return int(match[1]), float.fromhex(match[2].decode())
    except (ValueError, OverflowError):
        return None


def decode(data: bytes, plan: str, keys: int, field: str = "checkpoint") -> tuple[dict[int, float], int]:
    """Read the contents of a checkpoint.

    Args:
        data: the file's bytes.
        plan: hash of the plan that is to be continued.
        keys: its count of numbers.
        field: named by errors.

    Returns:
        The numbers by key, and how many bytes of `data` are whole lines.

    Raises:
        WeirError: if it is of another plan, no checkpoint, or damaged before its last line.
    """
    end = data.rfind(b"\n") + 1
    head, *lines = data[:end].split(b"\n")[:-1] or [b""]
    if not end:  # killed while the first line was written
        if not encode_header(plan, keys).startswith(data):
            raise WeirError("the file is no checkpoint of a sweep; choose another path", field)
        return {}, 0
    _check_header(head, plan, field)
    values: dict[int, float] = {}
    for number, line in enumerate(lines, 2):
        found = decode_value(line)
        if found is None or found[0] >= keys or found[0] in values:
            why = "is damaged" if found is None else f"names cell {found[0]}, which is unknown or was there before"
            raise WeirError(f"line {number} {why}; delete the file to start anew", field)
        values[found[0]] = found[1]
    return values, end


def _check_header(line: bytes, plan: str, field: str) -> None:
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, Mapping) or header.get("format") != FORMAT:
        raise WeirError("the file is no checkpoint of a sweep; choose another path", field)
    if header.get("version") != VERSION:
        raise WeirError(f"written by another version of Weir (format {header.get('version')})", field)
    if header.get("plan") != plan:
        raise WeirError(
            "the file belongs to another sweep: the weights, adapter, number of ranks, prompts, metric, axes or mode "
            "differ; "
            "repeat that call, or choose another path",
            field,
        )


class Checkpoint:
    """The file, open for one process; close it, or use it as a context.

    Args:
        path: new, or of the same plan.
        plan: hash of the plan.
        keys: numbers that the plan has.

    Attributes:
        values: numbers computed so far, by key.
    """

    def __init__(self, path: str | os.PathLike, plan: str, keys: int) -> None:
        self.path = os.fspath(path)
        try:
            self._file: BinaryIO = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - closed by `close`
        except (OSError, ValueError) as e:
            raise WeirError(f"cannot open {self.path}: {getattr(e, 'strerror', None) or e}", "checkpoint") from None
        try:
            self._lock()
            self._file.seek(0)
            data = self._file.read()
            self.values, end = decode(data, plan, keys)
            if end < len(data):
                self._file.truncate(end)
            if not end:
                self._append(encode_header(plan, keys))
        except BaseException:
            self._file.close()
            raise

    def add(self, key: int, value: float) -> None:
        assert key not in self.values, f"cell {key} was computed twice"
        self._append(encode_value(key, value))
        self.values[key] = value

    def _append(self, line: bytes) -> None:
        try:
            if self._file.write(line) != len(line):
                raise OSError(None, "the disk is full")
        except OSError as e:
            raise WeirError(f"cannot write {self.path}: {e.strerror or e}", "checkpoint") from None

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WeirError(f"another process is writing {self.path}", "checkpoint") from None

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class NoCheckpoint:
    """Numbers kept in memory alone, in the form of a `Checkpoint`."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}

    def add(self, key: int, value: float) -> None:
        assert key not in self.values, f"cell {key} was computed twice"
        self.values[key] = value

    def __enter__(self) -> NoCheckpoint:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Do nothing."""
