"""What is in a dataset: counts, sizes, and statistics of a sample of its rows."""

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
from vllm_weir.schema.hooks import Site
from vllm_weir.storage.dataset import ActivationDataset
from vllm_weir.storage.provenance import capture_notes, source_notes

RP8_NOTE = "rows of rp8 are least-squares estimates: norms are about sqrt(k / d_model) of the real ones"


@dataclass(frozen=True)
class SiteStats:
    """One site.

    Statistics are over a sample of the decoded rows: mean and standard deviation of the values, mean of the rows'
    norms; `bad`: sampled rows that hold NaN or Inf.
    """

    hook: str
    layer: int
    rows: int
    requests: int
    d_model: int
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
    """A dataset. `raw_bytes`: of the rows as the model made them, without compression."""

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
        """Plain JSON data."""
        return asdict(self)


def inspect(dataset: ActivationDataset, sample: int = 512, seed: int = 0) -> DatasetStats:
    """Look into a dataset. `sample`: rows of each site that statistics are taken from; 0 for none."""
    index = dataset.index
    widths = np.array([b.width for b in index.blocks] or [0])
    raw = np.array([_raw_bytes(b.header) for b in index.blocks] or [0])
    sites = [_site(dataset, i, site, widths, sample, seed) for i, site in enumerate(dataset.sites)]
    pairs = np.repeat(index.request, index.rows) << 32 | index.positions
    notes = index.notes + source_notes(index) + capture_notes(index)
    rp8 = [RP8_NOTE] if any(h["method"] == "rp8" for h in dataset.headers) else []
    return DatasetStats(
        path=dataset.url, layout=dataset.layout, requests=len(dataset), incomplete=len(dataset.incomplete),
        rows=dataset.count(), tokens=len(np.unique(pairs)), files=len({b.name for b in index.blocks}),
        stored_bytes=int((widths[index.block] * index.rows).sum()),
        raw_bytes=int((raw[index.block] * index.rows).sum()),
        headers=dataset.headers, sites=sites, notes=list(dict.fromkeys(notes + rp8)),
    )  # fmt: skip


def _raw_bytes(header: dict[str, Any]) -> int:
    return header["d_model"] * (4 if header["dtype"] == "float32" else 2)


def _site(dataset: ActivationDataset, code: int, site: Site, widths: np.ndarray, sample: int, seed: int) -> SiteStats:
    index = dataset.index
    runs = np.flatnonzero(index.site == code)
    which, at = index.expand(runs)
    empty: dict[str, Any] = {"d_model": 0, "method": "", "dtype": ""}
    header = index.blocks[index.block[runs[0]]].header if len(runs) else empty
    same_width = len({index.blocks[b].header["d_model"] for b in np.unique(index.block[runs]).tolist()}) == 1
    picked = np.random.default_rng(seed).permutation(len(which))[: sample if same_width else 0]
    picked.sort()
    return SiteStats(
        hook=site.hook, layer=site.layer, rows=len(which), requests=len(np.unique(index.request[runs])),
        d_model=header["d_model"], method=header["method"], dtype=header["dtype"],
        stored_bytes=int((widths[index.block[runs]] * index.rows[runs]).sum()),
        **_statistics(_read(dataset, which[picked], at[picked])),
    )  # fmt: skip


def _read(dataset: ActivationDataset, which: np.ndarray, at: np.ndarray) -> Tensor:
    """Rows for statistics; none of Vllm_mi_patch's that keep no values, do not say their width or are damaged."""
    try:
        return dataset.read(which, at).double()
    except StoreError:
        raise
    except WeirError:
        if dataset.layout != "vllm_mi_patch":
            raise
        return torch.zeros(0, 0)


def _statistics(rows: Tensor) -> dict[str, Any]:
    good = rows[rows.isfinite().all(-1)]
    out: dict[str, Any] = dict.fromkeys(("mean", "std", "norm", "smallest", "largest"))
    if good.numel():
        out["mean"], out["std"] = good.mean().item(), good.std(correction=0).item()
        out["norm"] = good.norm(dim=-1).mean().item()
        out["smallest"], out["largest"] = good.min().item(), good.max().item()
    return out | {"sampled": len(rows), "bad": len(rows) - len(good)}


def show(found: DatasetStats, console: Console | None = None) -> None:
    """Print figures as a table."""
    console = console or Console(highlight=False)
    console.print(f"[bold]{escape(found.path)}[/bold]: {found.layout}", soft_wrap=True)
    times = f", {found.raw_bytes / found.stored_bytes:.1f} times less than uncompressed" if found.stored_bytes else ""
    unfinished = f" ({found.incomplete} unfinished ones are left out)" if found.incomplete else ""
    console.print(
        f"{found.requests:,} requests{unfinished}, {found.tokens:,} tokens, {found.rows:,} rows in "
        f"{found.files:,} file{'s' if found.files != 1 else ''}; "
        f"{_size(found.stored_bytes)}{times if found.raw_bytes != found.stored_bytes else ''}",
        soft_wrap=True,
    )
    for header in found.headers:
        extra = "".join(f", {name} {header[name]}" for name in ("k", "seed") if header[name])
        line = f"records: {header['method']}{extra}, of {header['dtype']} rows of {header['d_model']}"
        console.print(line, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("site", no_wrap=True)
    names = ["rows", "requests", "width", "stored", "mean", "std", "norm", "min", "max"]
    bad = any(s.bad for s in found.sites)
    for name in [*names, "bad"] if bad else names:
        table.add_column(name, justify="right", no_wrap=True)
    for s in found.sites:
        figures = [f"{v:.2g}" if v is not None else "" for v in (s.mean, s.std, s.norm, s.smallest, s.largest)]
        cells = [f"{s.rows:,}", f"{s.requests:,}", str(s.d_model), _size(s.stored_bytes), *figures]
        table.add_row(f"{s.hook}\\[{s.layer}]", *cells, *([str(s.bad)] if bad else []))
    # As wide as its numbers are: rich would cut them to the width of the terminal, or to 80 where there is none.
    wanted = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    wide = Console(file=console.file, width=max(wanted, console.width), highlight=False)
    wide.print(table)
    if found.sites:
        most = max(s.sampled for s in found.sites)
        console.print(f"[dim]statistics over up to {most:,} rows of a site[/dim]", soft_wrap=True)
    for note in found.notes:
        console.print(f"note: {escape(note)}", soft_wrap=True)


def _size(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"
