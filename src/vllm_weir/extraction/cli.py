"""The command ``weir extract``."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape

from vllm_weir.extraction.run_spec import RecordCounts
from vllm_weir.schema.draft_layers import DRAFT_LAYERS
from vllm_weir.storage.cli import (
    exit_on_error,
    parse_compression,
    parse_engine_options,
    parse_ints,
    parse_json,
    parse_positions,
    progress_bar,
)
from vllm_weir.util.shipped import HELP

if TYPE_CHECKING:
    from vllm_weir.extraction.run import Summary
    from vllm_weir.sae.config import NamedPath

MAX_SHOWN = 5
"""Skipped records whose reasons are printed; skipped.jsonl has all."""


def extract(
    model: Annotated[str, typer.Argument(help=HELP)],
    source: Annotated[str, typer.Argument(help="JSONL, Parquet, .txt, a folder of them, or a saved HF dataset.")],
    out: Annotated[str, typer.Option("--out", "-o", help="Folder or fsspec URL; gone on with if it exists.")],
    layers: Annotated[str | None, typer.Option(help="'all', ints with commas, 'eagle3' or 'mtp'. [all]")] = None,
    hook: Annotated[str | None, typer.Option(help="Hook point, as `weir sites` lists them. [resid_post]")] = None,
    heads: Annotated[str | None, typer.Option(help="Heads to read: ints with commas. [all]")] = None,
    neurons: Annotated[str | None, typer.Option(help="Neurons to read: ints with commas. [all]")] = None,
    sae: Annotated[
        str | None, typer.Option("--sae", help="NAME=PATH or NAME=PATH@HOOK.LAYER: features instead of rows.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="With --sae: so many features of a row, the most active. [32]")
    ] = None,
    ids: Annotated[str | None, typer.Option(help="With --sae: ids of the features to write, with commas.")] = None,
    lora: Annotated[str | None, typer.Option(help="Folder of a LoRA adapter, under which records are read.")] = None,
    positions: Annotated[str, typer.Option(help="prompt, all, last_prompt, sampled, -4:, or JSON.")] = "prompt",
    compress: Annotated[str | None, typer.Option(help="rp8, full8, topk8, fp16, fp8, or JSON.")] = None,
    reduce: Annotated[str | None, typer.Option(help="last, mean or max: one row a record.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Rows' dtype: float32, float16, bfloat16. [the model's]")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each record.", min=1)] = 1,
    max_length: Annotated[int | None, typer.Option(help="Cut prompts to so many tokens.", min=1)] = None,
    column: Annotated[str, typer.Option(help="Field of a record: its text, messages or token ids.")] = "text",
    split: Annotated[str | None, typer.Option(help="Which split of a saved DatasetDict is read.")] = None,
    layout: Annotated[str | None, typer.Option(help="sharded, packed, per_request, npz, speculators.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many records.", min=1)] = None,
    batch: Annotated[int, typer.Option(help="Records that the engine gets at once.", min=1)] = 256,
    on_error: Annotated[
        str, typer.Option(help="Empty, too long or broken records: 'fail', or 'skip' and list them.")
    ] = "fail",
    engine: Annotated[
        list[str] | None, typer.Option("--engine", "-e", help="Option of vllm.LLM: key=value, or a JSON object.")
    ] = None,
    flush_seconds: Annotated[float, typer.Option(help="Least time between two publications.", min=0)] = 30.0,
    fsync: Annotated[bool, typer.Option("--fsync", help="Wait until files are on the disk.")] = False,
    shard_bytes: Annotated[
        int | None, typer.Option(help="Largest shard, of the layout sharded and of --sae. [256 MiB, 64 MiB]", min=1)
    ] = None,
    storage_options: Annotated[str, typer.Option(help="Options of fsspec for the dataset, JSON.")] = "{}",
    source_options: Annotated[str, typer.Option(help="Options of fsspec for the texts, JSON.")] = "{}",
    ray: Annotated[bool, typer.Option("--ray", help="Run on Ray.")] = False,
    ray_workers: Annotated[int, typer.Option(help="How many engines run on Ray.", min=1)] = 1,
    ray_address: Annotated[str | None, typer.Option(help="Address of a Ray cluster. [a local one]")] = None,
    ray_gpus: Annotated[float | None, typer.Option(help="GPUs of each worker. [1 where there are any]", min=0)] = None,
    ray_cpus: Annotated[float, typer.Option(help="CPUs of each worker.", min=0)] = 1,
    ray_options: Annotated[str, typer.Option(help="Arguments of ray.init, JSON.")] = "{}",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Read a dataset of texts with a model and store activations or features; run it again to continue.

    Exit code 0: done; 1: refused or failed; 130: interrupted.
    """
    with exit_on_error():
        from vllm_weir.extraction.plan import Ray
        from vllm_weir.extraction.run import extract as run

        options: dict[str, Any] = {"fsync": fsync, "storage_options": parse_json(storage_options, "storage_options")}
        if shard_bytes is not None:
            options["shard_bytes"] = shard_bytes
        cluster = Ray(ray_workers, ray_address, ray_gpus, ray_cpus, parse_json(ray_options, "ray_options"))
        with progress_reporter(quiet) as report:
            summary = run(
                source, model, out, hook=hook,
                layers=layers if layers in ("all", *DRAFT_LAYERS) else parse_ints(layers, "'all' or ints", "layers"),
                heads=parse_ints(heads, "ints", "heads"), neurons=parse_ints(neurons, "ints", "neurons"),
                sae=_named_path(sae), lora=lora, top_k=top_k, ids=parse_ints(ids, "ints", "ids"),
                positions=parse_positions(positions), compress=parse_compression(compress),
                reduce=cast(Any, reduce), dtype=dtype, max_tokens=max_tokens,
                max_length=max_length, column=column, split=split, layout=layout, limit=limit, batch=batch,
                on_error=cast(Any, on_error), engine=parse_engine_options(engine or []), ray=cluster if ray else None,
                flush_seconds=flush_seconds, source_options=parse_json(source_options, "source_options"), report=report,
                **options,
            )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(summary)))
    else:
        show(summary)
    if summary.interrupted:
        raise typer.Exit(130)


def _named_path(text: str | None) -> NamedPath | None:
    """Parse the option ``--sae``, in which a path alone is not enough."""
    from vllm_weir.sae.config import NamedPath

    return None if text is None else NamedPath.parse(text, "sae")


@contextmanager
def progress_reporter(quiet: bool) -> Iterator[Callable[[RecordCounts, int], None]]:
    """Show a progress bar with rows/s, tokens/s and the time left; yield what takes a step's counts and the total."""
    with progress_bar(quiet) as progress:
        task = progress.add_task("starting the engine", total=None, rate="")
        done, start = RecordCounts(), 0.0

        def report(step: RecordCounts, total: int) -> None:
            nonlocal start
            start = start or time.monotonic()
            done.add(step)
            elapsed = time.monotonic() - start
            rate = f"{done.rows / elapsed:,.0f} rows/s {done.tokens / elapsed:,.0f} tokens/s" if elapsed > 0.5 else ""
            progress.update(task, description="records", completed=done.records, total=total, rate=rate)

        yield report


def show(summary: Summary, console: Console | None = None) -> None:
    """Print the summary of a run."""
    from vllm_weir.storage.stats import readable_size

    console = console or Console(highlight=False, soft_wrap=True)
    s = summary
    speed = f", {s.bytes / 1e6 / s.seconds:,.1f} MB/s" if s.requests and s.seconds > 0 else ""
    console.print(
        f"{s.requests:,} of {s.records:,} records: {s.rows:,} rows of {s.tokens:,} tokens, {readable_size(s.bytes)} in "
        f"{s.seconds:,.1f} s{speed} -> [bold]{escape(s.url)}[/bold]"
    )
    if s.held:
        console.print(f"{s.held:,} records were there already")
    if s.truncated:
        console.print(f"{s.truncated:,} prompts were cut to the length asked for")
    if s.skipped:
        console.print(f"{len(s.skipped):,} records were skipped, listed in skipped.jsonl:")
        for index in sorted(s.skipped)[:MAX_SHOWN]:
            console.print(f"  record {index}: {escape(s.skipped[index])}")
        if len(s.skipped) > MAX_SHOWN:
            console.print(f"  and {len(s.skipped) - MAX_SHOWN:,} more")
    if s.interrupted:
        left = s.records - s.requests - s.held - len(s.skipped)
        console.print(f"[yellow]interrupted[/yellow], {left:,} records are left: the same command goes on")
