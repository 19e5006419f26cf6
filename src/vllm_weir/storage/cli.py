"""The commands ``weir inspect`` and ``weir convert``, and what commands over datasets share."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from vllm_weir.errors import WeirError
from vllm_weir.util.start_llm import told

if TYPE_CHECKING:
    from vllm_weir.storage.dataset import ActivationDataset
    from vllm_weir.storage.verify import Verified

_STORAGE_OPTIONS = typer.Option("--storage-options", help="Options of fsspec, JSON.")


def inspect(
    path: Annotated[str, typer.Argument(help="Folder, file, or fsspec URL.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    sample: Annotated[int, typer.Option(help="Rows of each site to take statistics from.", min=0)] = 512,
    verify: Annotated[bool, typer.Option("--verify", help="Read all rows; exit code 1 if some are damaged.")] = False,
    layer_ids: Annotated[str, typer.Option(help="Blocks of files of vLLM's own hidden states, with commas.")] = "",
    hidden_size: Annotated[int | None, typer.Option(help="d_model of a file of Vllm_mi_patch's topk8.")] = None,
    storage_options: Annotated[str, _STORAGE_OPTIONS] = "{}",
) -> None:
    """Show requests, sites, sizes and statistics of a dataset, and whether it is damaged."""
    from vllm_weir.storage.loading import load
    from vllm_weir.storage.stats import inspect as dataset_stats
    from vllm_weir.storage.stats import show

    with exit_on_error():
        dataset = load(path, **_load_options(layer_ids, hidden_size, storage_options))
        verified = _verify(dataset) if verify else None
        stats = dataset_stats(dataset, 0 if verified is not None and verified.damaged else sample)
    if as_json:
        more = {} if verified is None else {"verified": verified.to_dict()}
        typer.echo(json.dumps(stats.to_dict() | more, indent=2))
    else:
        show(stats)
    if verified is not None:
        _report(verified, as_json)


def _verify(dataset: ActivationDataset) -> Verified:
    from vllm_weir.storage.verify import verify

    with progress_bar(False) as bar:
        task = bar.add_task("rows", total=dataset.count(), rate="")
        return verify(dataset, lambda done: bar.update(task, completed=done))


def _report(verified: Verified, quiet: bool) -> None:
    """Print what was damaged, and exit with code 1 if anything was."""
    for file in verified.damaged:
        typer.echo(f"Error: {file.error} ({file.rows:,} damaged rows in this file)", err=True)
    if not quiet:
        with_checksum = verified.rows - verified.unsummed
        damaged = sum(file.rows for file in verified.damaged)
        typer.echo(f"{verified.rows:,} rows read, {with_checksum:,} have checksums, {damaged:,} are damaged")
    if verified.damaged:
        raise typer.Exit(1)


def convert(
    source: Annotated[str, typer.Argument(help="Folder, file, or fsspec URL.")],
    target: Annotated[str, typer.Argument(help="Folder or fsspec URL; continued if it exists.")],
    to: Annotated[
        str, typer.Option(help="Layout: sharded, packed, per_request, npz; fork: for RhizoNymph/vllm.")
    ] = "sharded",
    compress: Annotated[
        str | None, typer.Option(help="none, rp8, full8, topk8, fp16, fp8, or JSON. [as it is]")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Compress anew what is compressed already.")] = False,
    fsync: Annotated[bool, typer.Option("--fsync", help="Wait until files are on the disk.")] = False,
    layer_ids: Annotated[str, typer.Option(help="Blocks of files of vLLM's own hidden states, with commas.")] = "",
    hidden_size: Annotated[int | None, typer.Option(help="d_model of a file of Vllm_mi_patch's topk8.")] = None,
    storage_options: Annotated[str, _STORAGE_OPTIONS] = "{}",
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Copy activations into another layout or compression; run it again to continue."""
    from vllm_weir.storage.conversion import convert as copy_dataset
    from vllm_weir.storage.loading import load

    with exit_on_error(), progress_bar(quiet) as bar:
        load_options = _load_options(layer_ids, hidden_size, storage_options)
        dataset = load(source, **load_options)
        task = bar.add_task("rows", total=dataset.count(), rate="")

        def report(done: int, total: int) -> None:
            speed = bar.tasks[task].speed
            bar.update(task, completed=done, total=total, rate=f"{speed:,.0f} rows/s" if speed else "")

        copied = copy_dataset(
            dataset, target, to, compress=parse_compression(compress), again=again, progress=report, fsync=fsync,
            storage_options=load_options["storage_options"],
        )  # fmt: skip
    skipped = len(dataset) - copied
    already = f"; {skipped:,} were there already" if skipped else ""
    typer.echo(f"{copied:,} requests copied to {target}{already}")
    for note in dataset.index.notes:
        typer.echo(f"Note: {note}", err=True)


@contextlib.contextmanager
def progress_bar(quiet: bool) -> Iterator[Progress]:
    """Show a progress bar on stderr, or lines where that is no terminal; nothing if `quiet`.

    Its tasks have a field `rate`.
    """
    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"), TimeRemainingColumn(), console=Console(stderr=True),
        transient=True, disable=quiet or not sys.stderr.isatty(),  # else it ends with an empty line
    )  # fmt: skip
    with bar, contextlib.nullcontext() if quiet else told(lambda: _line(bar)):
        yield bar


def _line(bar: Progress) -> str:
    lines = []
    for task in bar.tasks:
        counts = "" if task.total is None else f": {task.completed:,.0f} of {task.total:,.0f} {task.fields['rate']}"
        lines.append(f"{task.description}{counts}".rstrip())
    return "; ".join(lines)


def parse_compression(text: str | None) -> Any:
    if text is not None and text.lstrip().startswith("{"):
        return parse_json(text, "compress")
    return text


def parse_ints(text: str | None, expected: str, field: str) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise WeirError(f"expected {expected} with commas, got {text[:40]!r}", field) from None


def parse_positions(text: str) -> Any:
    """Return a selector of positions: JSON, a name or a slice."""
    try:
        return json.loads(text)
    except ValueError:
        return text  # a name or a slice


def parse_engine_options(arguments: list[str]) -> dict[str, Any]:
    """Parse ``key=value`` arguments, whose values may be JSON, and JSON objects."""
    options: dict[str, Any] = {}
    for text in arguments:
        if text.lstrip().startswith("{"):
            options |= parse_json(text, "engine")
            continue
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise WeirError(f"expected key=value or a JSON object, got {text[:40]!r}", "engine")
        name = key.strip().replace("-", "_")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = {"True": True, "False": False, "None": None}.get(value, value)
    return options


def _load_options(layer_ids: str, hidden_size: int | None, storage_options: str) -> dict[str, Any]:
    ids = parse_ints(layer_ids or None, "ints", "layer_ids")
    options = parse_json(storage_options, "storage_options")
    return {"layer_ids": ids, "hidden_size": hidden_size, "storage_options": options}


def parse_json(text: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as e:
        raise WeirError(f"not valid JSON: {e}", field) from None
    if not isinstance(value, dict):
        raise WeirError("expected a JSON object", field)
    return value


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """End the command with the message of a WeirError and exit code 1, without a traceback."""
    try:
        yield
    except WeirError as e:
        typer.echo(f"Error: {e}", err=True)
        raise typer.Exit(1) from e
