"""The result of a sweep, and its file while the sweep runs."""

from __future__ import annotations

import fcntl
import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, overload

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.experiments.grid import Grid, GridFile
from vllm_weir.experiments.metrics import DENOISE, Baseline
from vllm_weir.experiments.sweep.plan import BASE_RUN, SOURCE_RUN, SweepPlan
from vllm_weir.schema.hooks import HookPoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vllm_weir.experiments.plots import HeatMapTable


FILE = GridFile("sweep", "by_pair")


@dataclass(frozen=True, eq=False)
class Sweep:
    """The metric of each patched run.

    Attributes:
        grid: mean over the pairs of prompts; axes ``hook``, ``layer``, ``position``, and ``head``
            if heads were swept.
        by_pair: the same with an axis ``pair`` before the others.
        baseline: the metric of the unpatched runs.
        noise_floor: largest change of the metric when the base run's own rows are put back, over
            all hook points, layers and pairs: what the engine's arithmetic changes between batches.
            Smaller effects say nothing.
        mode: ``"denoise"`` (the corrupt run with clean rows put in) or ``"noise"`` (the clean run
            with corrupt rows).
        metric: its name.
        to: the receiver of the path, as text; empty for none.
        position_labels: of the axis ``position``, with the tokens of the base prompt.
    """

    grid: Grid
    by_pair: Grid
    baseline: Baseline
    noise_floor: float
    mode: str
    metric: str
    to: str
    position_labels: tuple[str, ...]

    @classmethod
    def of(cls, plan: SweepPlan, values: Mapping[int, float], metric: str, labels: tuple[str, ...]) -> Sweep:
        """Make the result of a plan's numbers, by key."""
        numbers = np.array([values[key] for key in range(plan.keys)], np.float64).reshape(len(plan.pairs), -1)
        source, base = numbers[:, SOURCE_RUN], numbers[:, BASE_RUN]
        cells, own = numbers[:, 2 : 2 + plan.cells], numbers[:, 2 + plan.cells :]
        cells = cells.reshape(len(plan.pairs), *plan.shape)
        clean, corrupt = (source, base) if plan.mode == DENOISE else (base, source)
        return cls(
            Grid(cells.mean(0), plan.axes),
            Grid(cells, {"pair": tuple(range(len(plan.pairs))), **plan.axes}),
            Baseline(float(clean.mean()), float(corrupt.mean())),
            float(np.abs(own - base[:, None]).max()),
            plan.mode, metric, "" if plan.to is None else str(plan.to), labels,
        )  # fmt: skip

    @property
    def normalised(self) -> Grid:
        """The grid as a share of the way from the run that is patched, 0, to the other run, 1.

        Raises:
            WeirError: if the metric is the same in both, so that there is no way to go.
        """
        clean, corrupt = self.baseline
        base, source = (corrupt, clean) if self.mode == DENOISE else (clean, corrupt)
        if source == base:
            raise WeirError("the clean and the corrupt run have the same metric; use .grid", "metric")
        return Grid((self.grid.array - base) / (source - base), self.grid.axes)

    @overload
    def plot(self, path: None = None, *, hook: HookPoint | None = None, normalised: bool = True) -> Figure: ...

    @overload
    def plot(self, path: str | PathLike, *, hook: HookPoint | None = None, normalised: bool = True) -> list[Path]: ...

    def plot(
        self, path: str | PathLike | None = None, *, hook: HookPoint | None = None, normalised: bool = True
    ) -> Figure | list[Path]:
        """Draw a heat map for each hook point, layer by position, or by head.

        With heads and several positions, rows are heads of layers.

        Args:
            path: None to get the figure, which a notebook shows; ``.png`` or ``.svg``, one file for
                each hook point, whose name is added to the path if there are several; or ``.html``,
                one page with all of them.
            hook: draw this hook point alone.
            normalised: draw `normalised`; False draws the metric itself, as does a sweep whose two
                unpatched runs have the same metric.

        Returns:
            Without a path a ``matplotlib.figure.Figure``, with one the files.

        Raises:
            WeirError: for another suffix, without matplotlib, or if a file cannot be written.
        """
        from vllm_weir.experiments.plots import draw_grid

        tables, label = self._tables(hook, normalised)
        return draw_grid(tables, label, path, one_page=True)

    def _tables(self, hook: str | None = None, normalised: bool = True) -> tuple[list[HeatMapTable], str]:
        """Return the numbers of the hook points, and what they are."""
        from vllm_weir.experiments.plots import grid_tables

        about = f"path to {self.to}, {self.mode}" if self.to else self.mode
        if normalised and self.baseline.clean != self.baseline.corrupt:
            ends = "corrupt 0, clean 1" if self.mode == DENOISE else "clean 0, corrupt 1"
            grid, label = self.normalised, f"{self.metric}: {ends}"
        else:
            grid, label = self.grid, self.metric
        return grid_tables(grid, self.position_labels, about, hook), label

    def _repr_html_(self) -> str:
        from vllm_weir.experiments.plots import grid_html

        return grid_html(repr(self), *self._tables())

    def save(self, path: str | PathLike) -> Path:
        """Write a file that `load` reads: a ``.npz`` archive, whatever the path's suffix.

        Raises:
            WeirError: if it cannot be written.
        """
        return FILE.write(path, self)

    @classmethod
    def load(cls, path: str | PathLike) -> Sweep:
        """Read what `save` has written.

        Raises:
            WeirError: if the file cannot be read, or is anything else.
        """
        return FILE.read(path, cls, grid=_mean_of_pairs)

    def __repr__(self) -> str:
        shape = ", ".join(f"{name}: {len(labels)}" for name, labels in self.grid.axes.items())
        clean, corrupt = self.baseline
        return f"Sweep({self.mode}, {shape}, clean {clean:.4g}, corrupt {corrupt:.4g}, noise {self.noise_floor:.2g})"


def _mean_of_pairs(by_pair: Grid) -> Grid:
    return Grid(by_pair.array.mean(0), {name: labels for name, labels in by_pair.axes.items() if name != "pair"})


# `Checkpoint`: an append-only file of the numbers that a sweep has computed.
#
# The first line says which plan they belong to. Each further line is one number::
#
#     <key> <value as hexadecimal float> <CRC-32 of the rest of the line>
#
# A process that is killed leaves at most one line unfinished, the last; it is cut off when the file is
# opened again.

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
