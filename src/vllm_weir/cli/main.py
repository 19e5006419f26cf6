"""The command `weir`."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

try:
    import typer

    from vllm_weir.bench.cli import app as bench
    from vllm_weir.cli.sae import sae
    from vllm_weir.experiments.fit.cli import fit
    from vllm_weir.experiments.sweep.cli import sweep
    from vllm_weir.extraction.cli import extract
    from vllm_weir.storage.cli import convert, inspect
except Exception as e:  # noqa: BLE001 - whatever it is, the command reports it without a traceback
    from vllm_weir.cli.doctor import cannot_run

    sys.exit(cannot_run(sys.argv[1:], e))

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Read and steer models served by vLLM.")
app.add_typer(bench, name="bench")
app.add_typer(sae, name="sae")
app.command()(inspect)
app.command()(convert)
app.command()(extract)
app.command()(fit)
app.command()(sweep)


@app.callback()
def main() -> None:
    """Read the activations of models served by vLLM."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    live: Annotated[bool, typer.Option(help="Start an engine and compare its rows with transformers.")] = True,
    model: Annotated[str | None, typer.Option(help="Model for the live test; default: the shipped one.")] = None,
) -> None:
    """Show versions, platform and every patch point, and run a self-test.

    The exit code is 1 if there is a problem.
    """
    _quiet_vllm()
    from vllm_weir.cli.doctor import examine, show

    found = examine(live, model)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        show(found)
    raise typer.Exit(0 if found.healthy else 1)


@app.command()
def sites(
    model: Annotated[str, typer.Argument(help="Directory or hub id of the model.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
    load_format: Annotated[str, typer.Option(help="vLLM's; 'dummy' needs the configuration only.")] = "auto",
    dtype: Annotated[str, typer.Option(help="vLLM's.")] = "auto",
    trust_remote_code: Annotated[bool, typer.Option(help="vLLM's.")] = False,
) -> None:
    """Show which hook points of a model can be captured and steered, and why the others cannot."""
    _quiet_vllm()
    from vllm_weir.cli.sites import show, survey
    from vllm_weir.errors import WeirError

    try:
        verdicts = survey(model, load_format=load_format, dtype=dtype, trust_remote_code=trust_remote_code)
    except WeirError as e:
        typer.echo(str(e), err=True)
        raise typer.Exit(1) from None
    except (OSError, ValueError) as e:  # of vLLM or transformers: no such model
        typer.echo(f"Error: vLLM cannot load {model}: {e}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps([v._asdict() for v in verdicts], indent=2))
    else:
        show(model, verdicts)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--weir-help"]}
)
def serve(context: typer.Context) -> None:
    """Run vllm serve MODEL [options] with Weir's routes.

    Also takes --weir-admin-key-file PATH (or WEIR_ADMIN_KEY), --weir-sae NAME=PATH[@HOOK.LAYER],
    repeatable; the place is for files that do not say theirs; --weir-hook NAME=MODULE:ATTRIBUTE,
    repeatable, functions that requests name; and --steering-modules NAME=FILE ...
    """
    from vllm_weir.errors import WeirError
    from vllm_weir.guard.refuse import cause_of

    try:
        from vllm_weir.cli.serve import serve as run

        run(context.args)
    except (WeirError, ImportError) as e:
        typer.echo(str(e) if isinstance(e, WeirError) else cause_of(e), err=True)
        raise typer.Exit(2) from None


@app.command()
def version() -> None:
    """Print the version."""
    from vllm_weir import __version__

    typer.echo(__version__)


def _quiet_vllm() -> None:
    """Have vLLM log errors only, to stderr, unless the environment says otherwise."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")


if __name__ == "__main__":
    app()
