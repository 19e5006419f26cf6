"""The commands ``weir sae ...``."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_weir.storage.cli import exit_on_error, parse_json, progress_bar

sae = typer.Typer(no_args_is_help=True, help="Look at sparse autoencoders.")


@sae.callback()
def main() -> None:
    """Look at sparse autoencoders."""


@sae.command()
def report(
    sae: Annotated[str, typer.Argument(help="Directory of the sparse autoencoder.")],
    features: Annotated[str, typer.Option("--features", "-f", help="What `weir extract --sae` wrote with it.")],
    out: Annotated[str, typer.Option("--out", "-o", help="HTML file to write.")] = "report.html",
    feature: Annotated[list[int] | None, typer.Option(help="Show this feature; as often as needed.", min=0)] = None,
    top: Annotated[int | None, typer.Option(help="Show so many features. [50]", min=1)] = None,
    order: Annotated[str, typer.Option(help="What --top goes by: max (largest activation) or density.")] = "max",
    contexts: Annotated[int, typer.Option(help="Most contexts of a feature.", min=1)] = 12,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Directory or hub id of a model. [that which read the texts]"),
    ] = None,
    storage_options: Annotated[str, typer.Option(help="Options of fsspec for the features, JSON.")] = "{}",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not show what is being done.")] = False,
) -> None:
    """Write a page on features: top contexts, densities, histograms and effects on logits.

    Exit code 0: done; 1: refused or failed.
    """
    with exit_on_error():
        from vllm_weir.analysis.feature_report.report import sae_report

        with progress_bar(quiet) as bar:
            task = bar.add_task("opening the features", total=None, rate="")
            written = sae_report(
                sae, features, out, feature=feature or None, top=top, order=order, contexts=contexts, model=model,
                storage_options=parse_json(storage_options, "storage_options"),
                progress=lambda text: bar.update(task, description=text),
            )  # fmt: skip
    for note in written.notes:
        typer.echo(f"Note: {note}", err=True)
    typer.echo(f"{len(written.features):,} features, {written.totals.rows:,} tokens -> {out}")
