"""``weir inspect`` and ``weir convert``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from vllm_weir.errors import WeirError

if TYPE_CHECKING:
    from vllm_weir.storage.dataset import ActivationDataset
    from vllm_weir.storage.verify import Verified

_OPTIONS = typer.Option("--storage-options", help="For fsspec, JSON.")


def inspect(
    path: Annotated[str, typer.Argument(help="Folder, file, or fsspec URL.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    sample: Annotated[int, typer.Option(help="Rows of each site to take statistics from.", min=0)] = 512,
    verify: Annotated[bool, typer.Option("--verify", help="Read all rows; exit code 1 if some are damaged.")] = False,
    layer_ids: Annotated[str, typer.Option(help="Of vLLM's own hidden states, with commas.")] = "",
    hidden_size: Annotated[int | None, typer.Option(help="d_model, for Vllm_mi_patch's topk8.")] = None,
    storage_options: Annotated[str, _OPTIONS] = "{}",
) -> None:
    """Show what a dataset holds: requests, sites, sizes, statistics; and whether all of it is whole."""
    from vllm_weir.storage.loading import load
    from vllm_weir.storage.stats import inspect as look
    from vllm_weir.storage.stats import show

    with _refusals():
        dataset = load(path, **_reading(layer_ids, hidden_size, storage_options))
        checked = _verified(dataset) if verify else None
        found = look(dataset, 0 if checked is not None and checked.damaged else sample)
    if as_json:
        more = {} if checked is None else {"verified": checked.to_dict()}
        typer.echo(json.dumps(found.to_dict() | more, indent=2))
    else:
        show(found)
    if checked is not None:
        _report(checked, as_json)


def _verified(dataset: ActivationDataset) -> Verified:
    from vllm_weir.storage.verify import verify

    with _progress(False) as bar:
        task = bar.add_task("rows", total=dataset.count(), rate="")
        return verify(dataset, lambda done: bar.update(task, completed=done))


def _report(checked: Verified, quiet: bool) -> None:
    """Say what a verification found, and end with exit code 1 if it found damage."""
    for one in checked.damaged:
        typer.echo(f"Error: {one.error} ({one.rows:,} damaged rows in this file)", err=True)
    if not quiet:
        summed = checked.rows - checked.unsummed
        damaged = sum(one.rows for one in checked.damaged)
        typer.echo(f"{checked.rows:,} rows read, {summed:,} have checksums, {damaged:,} are damaged")
    if checked.damaged:
        raise typer.Exit(1)


def convert(
    source: Annotated[str, typer.Argument(help="Folder, file, or fsspec URL.")],
    target: Annotated[str, typer.Argument(help="Folder or fsspec URL; continued if it exists.")],
    to: Annotated[str, typer.Option(help="Layout: sharded, packed, per_request, npz.")] = "sharded",
    compress: Annotated[
        str | None, typer.Option(help="none, rp8, full8, topk8, fp16, fp8, or JSON. [as it is]")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Compress anew what is compressed already.")] = False,
    fsync: Annotated[bool, typer.Option("--fsync", help="Wait until files are on the disk.")] = False,
    layer_ids: Annotated[str, typer.Option(help="Of vLLM's own hidden states, with commas.")] = "",
    hidden_size: Annotated[int | None, typer.Option(help="d_model, for Vllm_mi_patch's topk8.")] = None,
    storage_options: Annotated[str, _OPTIONS] = "{}",
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Copy activations into another layout or compression; run again, it goes on where it stopped."""
    from vllm_weir.storage.conversion import convert as copy
    from vllm_weir.storage.loading import load

    with _refusals(), _progress(quiet) as bar:
        reading = _reading(layer_ids, hidden_size, storage_options)
        dataset = load(source, **reading)
        task = bar.add_task("rows", total=dataset.count(), rate="")

        def step(done: int, total: int) -> None:
            speed = bar.tasks[task].speed
            bar.update(task, completed=done, total=total, rate=f"{speed:,.0f} rows/s" if speed else "")

        copied = copy(
            dataset, target, to, compress=_compression(compress), again=again, progress=step, fsync=fsync,
            storage_options=reading["storage_options"],
        )  # fmt: skip
    skipped = len(dataset) - copied
    there = f"; {skipped:,} were there already" if skipped else ""
    typer.echo(f"{copied:,} requests copied to {target}{there}")
    for note in dataset.index.notes:
        typer.echo(f"Note: {note}", err=True)


def _progress(quiet: bool) -> Progress:
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"), TimeRemainingColumn(), console=Console(stderr=True),
        transient=True, disable=quiet,
    )  # fmt: skip


def _compression(text: str | None) -> Any:
    if text is not None and text.lstrip().startswith("{"):
        return _json(text, "compress")
    return text


def _reading(layer_ids: str, hidden_size: int | None, storage_options: str) -> dict[str, Any]:
    try:
        ids = [int(n) for n in layer_ids.split(",")] if layer_ids else None
    except ValueError:
        raise WeirError(f"ints with commas, got {layer_ids[:40]!r}", "layer_ids") from None
    return {"layer_ids": ids, "hidden_size": hidden_size, "storage_options": _json(storage_options, "storage_options")}


def _json(text: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as e:
        raise WeirError(f"not valid JSON: {e}", field) from None
    if not isinstance(value, dict):
        raise WeirError("a JSON object", field)
    return value


class _refusals:
    """Ends the command with exit code 1 and the message of a WeirError, without a traceback."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, WeirError):
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(1) from error
