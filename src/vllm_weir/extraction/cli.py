"""The command ``weir extract``."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_weir.storage.cli import (
    exit_on_error,
    parse_compression,
    parse_engine_options,
    parse_ints,
    parse_json,
    parse_positions,
)
from vllm_weir.util.shipped import HELP

if TYPE_CHECKING:
    from vllm_weir.sae.named_path import NamedPath


def extract(
    model: Annotated[str, typer.Argument(help=HELP)],
    source: Annotated[str, typer.Argument(help="JSONL, Parquet, .txt, a folder of them, or a saved HF dataset.")],
    out: Annotated[str, typer.Option("--out", "-o", help="Folder or fsspec URL; gone on with if it exists.")],
    layers: Annotated[str | None, typer.Option(help="'all', or ints with commas. [all]")] = None,
    hook: Annotated[str | None, typer.Option(help="Hook point, as `weir sites` lists them. [resid_post]")] = None,
    heads: Annotated[str | None, typer.Option(help="Only these heads: ints with commas. [all]")] = None,
    neurons: Annotated[str | None, typer.Option(help="Only these neurons: ints with commas. [all]")] = None,
    sae: Annotated[
        str | None, typer.Option("--sae", help="NAME=PATH or NAME=PATH@HOOK.LAYER: features instead of rows.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="With --sae: so many features of a row, the most active. [32]")
    ] = None,
    ids: Annotated[str | None, typer.Option(help="With --sae: these features instead, with commas.")] = None,
    positions: Annotated[str, typer.Option(help="prompt, all, last_prompt, sampled, -4:, or JSON.")] = "prompt",
    compress: Annotated[str | None, typer.Option(help="rp8, full8, topk8, fp16, fp8, or JSON.")] = None,
    reduce: Annotated[str | None, typer.Option(help="last, mean or max: one row a record.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Rows' dtype: float32, float16, bfloat16. [the model's]")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each record.", min=1)] = 1,
    max_length: Annotated[int | None, typer.Option(help="Cut prompts to so many tokens.", min=1)] = None,
    column: Annotated[str, typer.Option(help="Field of a record that is its text, or its list of messages.")] = "text",
    split: Annotated[str | None, typer.Option(help="Which split of a saved DatasetDict is read.")] = None,
    layout: Annotated[str | None, typer.Option(help="sharded, packed, per_request, npz. [sharded]")] = None,
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
        from vllm_weir.extraction.progress import progress_reporter, show
        from vllm_weir.extraction.run import extract as run

        options: dict[str, Any] = {"fsync": fsync, "storage_options": parse_json(storage_options, "storage_options")}
        if shard_bytes is not None:
            options["shard_bytes"] = shard_bytes
        cluster = Ray(ray_workers, ray_address, ray_gpus, ray_cpus, parse_json(ray_options, "ray_options"))
        with progress_reporter(quiet) as report:
            summary = run(
                source, model, out, hook=hook,
                layers=layers if layers == "all" else parse_ints(layers, "'all' or ints", "layers"),
                heads=parse_ints(heads, "ints", "heads"), neurons=parse_ints(neurons, "ints", "neurons"),
                sae=_named_path(sae), top_k=top_k, ids=parse_ints(ids, "ints", "ids"),
                positions=parse_positions(positions), compress=parse_compression(compress),
                reduce=reduce, dtype=dtype, max_tokens=max_tokens,
                max_length=max_length, column=column, split=split, layout=layout, limit=limit, batch=batch,
                on_error=on_error, engine=parse_engine_options(engine or []), ray=cluster if ray else None,
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
    from vllm_weir.sae.named_path import NamedPath

    return None if text is None else NamedPath.parse(text, "sae")
