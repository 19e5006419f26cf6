"""Counts and sizes of a dataset, and statistics over a sample of its rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from vllm_weir.errors import StoreError, WeirError
from vllm_weir.schema.compression import ITEMSIZE, header_shape, shape_text
from vllm_weir.schema.hooks import Site
from vllm_weir.storage.dataset import ActivationDataset
from vllm_weir.storage.provenance import capture_notes, source_notes

RP8_NOTE = "rows of rp8 are least-squares estimates: norms are about sqrt(k / d_model) of the real ones"


@dataclass(frozen=True)
class SiteStats:
    """Figures of one site.

    Statistics are over a sample of the decoded rows.

    Attributes:
        hook, layer: The site.
        rows, requests: Rows of the site, and requests that have some.
        d_model: Values of a row.
        shape: Its shape, say [heads, d_head].
        method, dtype: Compression, and the dtype of the rows before it.
        stored_bytes: Bytes of the records.
        sampled: Rows in the sample.
        mean, std, smallest, largest: Over the values of the sample.
        norm: Mean of the norms of the rows.
        bad: Rows of the sample that contain NaN or Inf.
    """

    hook: str
    layer: int
    rows: int
    requests: int
    d_model: int
    shape: list[int]
    method: str
    dtype: str
    stored_bytes: int
    sampled: int
    mean: float | None
    std: float | None
    norm: float | None
    smallest: float | None
    largest: float | None
    bad: int


@dataclass(frozen=True)
class DatasetStats:
    """Figures of a dataset.

    Attributes:
        path, layout: The dataset.
        requests, incomplete: Finished requests, and unfinished ones, which are left out.
        rows, tokens: Rows, and distinct positions of requests.
        files: Files with records.
        stored_bytes, raw_bytes: Bytes of the records, and of the same rows without compression.
        headers: Distinct headers of the records.
        sites: Figures of each site.
        notes: What a user should know about the data.
    """

    path: str
    layout: str
    requests: int
    incomplete: int
    rows: int
    tokens: int
    files: int
    stored_bytes: int
    raw_bytes: int
    headers: list[dict[str, Any]]
    sites: list[SiteStats]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def inspect(dataset: ActivationDataset, sample: int = 512, seed: int = 0) -> DatasetStats:
    """Return figures of a dataset, with statistics over `sample` random rows of each site."""
    index = dataset.index
    widths = np.array([b.width for b in index.blocks] or [0])
    raw = np.array([_raw_bytes(b.header) for b in index.blocks] or [0])
    sites = [_site_stats(dataset, i, site, widths, sample, seed) for i, site in enumerate(dataset.sites)]
    pairs = np.repeat(index.run_request, index.run_rows) << 32 | index.positions
    notes = index.notes + source_notes(index) + capture_notes(index)
    rp8 = [RP8_NOTE] if any(h["method"] == "rp8" for h in dataset.headers) else []
    return DatasetStats(
        path=dataset.url, layout=dataset.layout, requests=len(dataset), incomplete=len(dataset.incomplete),
        rows=dataset.count(), tokens=len(np.unique(pairs)), files=len({b.name for b in index.blocks}),
        stored_bytes=int((widths[index.run_block] * index.run_rows).sum()),
        raw_bytes=int((raw[index.run_block] * index.run_rows).sum()),
        headers=dataset.headers, sites=sites, notes=list(dict.fromkeys(notes + rp8)),
    )  # fmt: skip


def _raw_bytes(header: dict[str, Any]) -> int:
    return header["d_model"] * ITEMSIZE[header["dtype"]]


def _site_stats(
    dataset: ActivationDataset, code: int, site: Site, widths: np.ndarray, sample: int, seed: int
) -> SiteStats:
    index = dataset.index
    runs = np.flatnonzero(index.run_site == code)
    row_runs, row_ids = index.expand(runs)
    empty: dict[str, Any] = {"d_model": 0, "method": "", "dtype": ""}
    header = index.blocks[index.run_block[runs[0]]].header if len(runs) else empty
    same_shape = len({header_shape(index.blocks[b].header) for b in np.unique(index.run_block[runs]).tolist()}) == 1
    picked = np.random.default_rng(seed).permutation(len(row_runs))[: sample if same_shape else 0]
    picked.sort()
    return SiteStats(
        hook=site.hook, layer=site.layer, rows=len(row_runs), requests=len(np.unique(index.run_request[runs])),
        d_model=header["d_model"], shape=list(header_shape(header)), method=header["method"], dtype=header["dtype"],
        stored_bytes=int((widths[index.run_block[runs]] * index.run_rows[runs]).sum()),
        **_statistics(_sampled_rows(dataset, row_runs[picked], row_ids[picked])),
    )  # fmt: skip


def _sampled_rows(dataset: ActivationDataset, row_runs: np.ndarray, row_ids: np.ndarray) -> Tensor:
    """Read rows for statistics, or none from Vllm_mi_patch's files that cannot be decoded."""
    try:
        return dataset.read(row_runs, row_ids).double().flatten(1)
    except StoreError:
        raise
    except WeirError:
        if dataset.layout != "vllm_mi_patch":
            raise
        return torch.zeros(0, 0)


def _statistics(rows: Tensor) -> dict[str, Any]:
    finite = rows[rows.isfinite().all(-1)]
    stats: dict[str, Any] = dict.fromkeys(("mean", "std", "norm", "smallest", "largest"))
    if finite.numel():
        stats["mean"], stats["std"] = finite.mean().item(), finite.std(correction=0).item()
        stats["norm"] = finite.norm(dim=-1).mean().item()
        stats["smallest"], stats["largest"] = finite.min().item(), finite.max().item()
    return stats | {"sampled": len(rows), "bad": len(rows) - len(finite)}


def show(found: DatasetStats, console: Console | None = None) -> None:
    """Print the figures of a dataset as a table."""
    console = console or Console(highlight=False)
    console.print(f"[bold]{escape(found.path)}[/bold]: {found.layout}", soft_wrap=True)
    times = f", {found.raw_bytes / found.stored_bytes:.1f} times less than uncompressed" if found.stored_bytes else ""
    unfinished = f" ({found.incomplete} unfinished ones are left out)" if found.incomplete else ""
    console.print(
        f"{found.requests:,} requests{unfinished}, {found.tokens:,} tokens, {found.rows:,} rows in "
        f"{found.files:,} file{'s' if found.files != 1 else ''}; "
        f"{readable_size(found.stored_bytes)}{times if found.raw_bytes != found.stored_bytes else ''}",
        soft_wrap=True,
    )
    for header in found.headers:
        extra = "".join(f", {name} {header[name]}" for name in ("k", "seed") if header[name])
        line = f"records: {header['method']}{extra}, of {header['dtype']} rows of {shape_text(header_shape(header))}"
        console.print(line, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("site", no_wrap=True)
    names = ["rows", "requests", "width", "stored", "mean", "std", "norm", "min", "max"]
    bad = any(s.bad for s in found.sites)
    for name in [*names, "bad"] if bad else names:
        table.add_column(name, justify="right", no_wrap=True)
    for s in found.sites:
        figures = [f"{v:.2g}" if v is not None else "" for v in (s.mean, s.std, s.norm, s.smallest, s.largest)]
        cells = [f"{s.rows:,}", f"{s.requests:,}", shape_text(s.shape), readable_size(s.stored_bytes), *figures]
        table.add_row(f"{s.hook}\\[{s.layer}]", *cells, *([str(s.bad)] if bad else []))
    # As wide as its numbers need: rich would cut them to the width of the terminal, or to 80
    # columns.
    wanted = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    wide = Console(file=console.file, width=max(wanted, console.width), highlight=False)
    wide.print(table)
    if found.sites:
        most = max(s.sampled for s in found.sites)
        console.print(f"[dim]statistics over up to {most:,} rows of a site[/dim]", soft_wrap=True)
    for note in found.notes:
        console.print(f"note: {escape(note)}", soft_wrap=True)


def readable_size(n: float) -> str:
    """Return a number of bytes with a decimal unit, e.g. ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"
