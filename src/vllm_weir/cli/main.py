"""The command `weir`."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

try:
    import typer

    from vllm_weir.bench.cli import app as bench
    from vllm_weir.cli.options import HELP, Commands, ModelFirst
    from vllm_weir.cli.sae import sae
    from vllm_weir.experiments.fit.cli import fit
    from vllm_weir.experiments.sweep.cli import sweep
    from vllm_weir.extraction.cli import extract
    from vllm_weir.storage.cli import convert, exit_on_error, inspect
    from vllm_weir.util.shipped import HELP as MODEL
    from vllm_weir.util.shipped import check_folder
    from vllm_weir.util.start_llm import reason
except Exception as e:  # noqa: BLE001 - whatever it is, the command reports it without a traceback
    from vllm_weir.cli.doctor import cannot_run

    sys.exit(cannot_run(sys.argv[1:], e))

app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, context_settings=HELP)
app.add_typer(bench, name="bench")
app.add_typer(sae, name="sae")
app.command()(inspect)
app.command()(convert)
for command in (extract, fit, sweep):
    app.command(cls=ModelFirst)(command)


def _version(asked: bool) -> None:
    if asked:
        from vllm_weir import __version__

        typer.echo(__version__)
        raise typer.Exit()


@app.command()
def version() -> None:
    """Print the version."""
    _version(True)


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Read and steer models served by vLLM."""


@app.command(cls=ModelFirst)
def doctor(
    model: Annotated[str, typer.Argument(help=f"{MODEL} The self-test runs it.")] = "demo",
    full: Annotated[bool, typer.Option("--full", help="Also print every function of vLLM that Weir wraps.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    live: Annotated[bool, typer.Option(help="Start an engine and compare its rows with transformers.")] = True,
) -> None:
    """Say whether Weir works here: versions, the functions of vLLM that it wraps, and a self-test.

    The exit code is 1 if there is a problem.
    """
    _quiet_vllm()
    from vllm_weir.cli.doctor import examine, show

    with exit_on_error():
        check_folder(model)
    found = examine(live, model)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        show(found, full)
    raise typer.Exit(0 if found.healthy else 1)


@app.command(cls=ModelFirst)
def sites(
    model: Annotated[str, typer.Argument(help=MODEL)],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
    load_format: Annotated[
        str, typer.Option(help="How weights are loaded; dummy needs only the configuration.")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="The dtype in which vLLM runs the model.")] = "auto",
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that comes with the model.")] = False,
) -> None:
    """Show which hook points of a model can be captured and steered, and why the others cannot."""
    _quiet_vllm()
    from vllm_weir.cli.sites import show, survey

    with exit_on_error():
        verdicts = survey(model, load_format=load_format, dtype=dtype, trust_remote_code=trust_remote_code)
    if as_json:
        typer.echo(json.dumps([v._asdict() for v in verdicts], indent=2))
    else:
        show(model, verdicts)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--weir-help"]}
)
def serve(context: typer.Context) -> None:
    """Run vllm serve MODEL with its options and Weir's routes; weir serve demo serves the shipped model.

    Also takes --weir-admin-key-file PATH (or WEIR_ADMIN_KEY), --weir-sae NAME=PATH[@HOOK.LAYER],
    repeatable; the place is for files that do not say theirs; --weir-hook NAME=MODULE:ATTRIBUTE,
    repeatable, functions that requests name; --weir-lens NAME=PATH, repeatable, fitted lenses that
    requests name; --weir-warm on|off, whether the server warms what these name before it is ready;
    --weir-store URL, a folder or bucket that servers of one model share; --weir-default-capture
    LAYERS and --weir-default-capture-dir DIR, what plain requests leave in files for trainers of
    draft models; and --steering-modules NAME=FILE ...
    """
    from vllm_weir.errors import WeirError
    from vllm_weir.guard.refuse import cause_of

    try:
        from vllm_weir.cli.serve import serve as run

        run(context.args)
    except (WeirError, ImportError) as e:
        typer.echo(str(e) if isinstance(e, WeirError) else cause_of(e), err=True)
        raise typer.Exit(2) from None
    except (OSError, ValueError) as e:  # of vLLM or transformers: no such model, or options that do not fit it
        typer.echo(f"Error: vLLM cannot serve {context.args[0]}: {reason(e)}", err=True)
        raise typer.Exit(2) from None


def _quiet_vllm() -> None:
    """Have vLLM log errors only, to stderr, unless the environment says otherwise."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")


if __name__ == "__main__":
    app()
