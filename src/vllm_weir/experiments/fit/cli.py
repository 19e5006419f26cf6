"""The command ``weir fit``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from vllm_weir.errors import WeirError
from vllm_weir.schema.model_facts import ModelConfig
from vllm_weir.storage.cli import exit_on_error, parse_engine_options, parse_ints, parse_positions
from vllm_weir.util.shipped import HELP
from vllm_weir.util.start_llm import start_llm

if TYPE_CHECKING:
    from vllm_weir.schema.capture import Capture

SUFFIXES = (".gguf", ".safetensors")


def fit(
    model: Annotated[str, typer.Argument(help=HELP)],
    positive: Annotated[str, typer.Argument(help="File of prompts: a text a line, or JSONL of texts or chats.")],
    negative: Annotated[
        str, typer.Argument(help="File of the other class's prompts; with as many lines they are pairs.")
    ],
    out: Annotated[str, typer.Option("--out", "-o", help="File for the vectors: .gguf or .safetensors.")],
    method: Annotated[
        str, typer.Option(help="diff, pca, pca_center, lat, logistic or logistic_pairs; see the guide.")
    ] = "diff",
    hook: Annotated[str, typer.Option(help="Hook point, as `weir sites` lists them.")] = "resid_post",
    layers: Annotated[str, typer.Option(help="'all', or ints with commas.")] = "all",
    head: Annotated[int | None, typer.Option(help="Fit one head, where a hook point has a row for each.")] = None,
    positions: Annotated[str, typer.Option(help="last_prompt, prompt, -4:, or JSON.")] = "last_prompt",
    folds: Annotated[int, typer.Option(help="Parts of the prompts that are held out in turn.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed by which prompts go to the parts.")] = 0,
    check: Annotated[bool, typer.Option(help="Steer and ablate prompts that were held out.")] = True,
    answer: Annotated[str | None, typer.Option(help="The check looks at logit(answer) - logit(wrong).")] = None,
    wrong: Annotated[str | None, typer.Option(help="The token whose logit the check subtracts.")] = None,
    plot: Annotated[str | None, typer.Option(help="Picture of the AUC by block: .png, .svg or .html.")] = None,
    lora: Annotated[str | None, typer.Option(help="Folder of a LoRA adapter, under which prompts are read.")] = None,
    column: Annotated[str, typer.Option(help="Field that is the prompt, in JSONL of objects.")] = "text",
    engine: Annotated[
        list[str] | None, typer.Option("--engine", "-e", help="Option of vllm.LLM: key=value, or a JSON object.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Fit a direction at each block from prompts of two classes.

    Exit code 0: done; 1: refused or failed.
    """
    with exit_on_error():
        from vllm_weir.experiments.adapter import options_under
        from vllm_weir.experiments.fit.engine import parse_heads
        from vllm_weir.experiments.fit.run import fit as run
        from vllm_weir.experiments.prompts import read_prompts

        _check_files(out, plot, hook)
        blocks = layers if layers == "all" else parse_ints(layers, "'all' or ints", "layers")
        metric = _metric(answer, wrong, check)
        first, second = (
            read_prompts(path, name, column) for path, name in ((positive, "positive"), (negative, "negative"))
        )
        options = options_under(lora, parse_engine_options(engine or []))
        asked = _check_arguments(
            (len(first), len(second)), method, hook, blocks, parse_positions(positions), folds, seed
        )
        parse_heads(head, hook)
        config = ModelConfig.read(model, options)
        config.check_layers(asked.hook, asked.layers)
        config.check_heads(head, "head")
        found = run(
            start_llm(model, options), first, second, cast(Any, method), hook, blocks,
            parse_positions(positions), heads=head, folds=folds, seed=seed, check=check, metric=metric, lora=lora,
            progress=not quiet,
        )  # fmt: skip
        found = found if head is None else found[head]
        found.save(out)
        files = [out] if plot is None else [out, str(found.plot(plot))]
    _show(found, files, as_json)


def _check_files(out: str, plot: str | None, hook: str) -> None:
    """Refuse files that cannot be written, while nothing is lost."""
    from vllm_weir.experiments.plots import check_output, check_plot
    from vllm_weir.experiments.vectors.codec import check_gguf_hook
    from vllm_weir.schema.hooks import normalise_hook

    if not out.lower().endswith(SUFFIXES):
        raise WeirError(f"expected a name that ends in {' or '.join(SUFFIXES)}", "out")
    name = normalise_hook(hook)
    if out.lower().endswith(".gguf"):
        check_gguf_hook(name, "out")
    check_output(out, "out")
    if plot is not None:
        check_plot(plot)


def _check_arguments(
    counts: tuple[int, int], method: str, hook: str, layers: Any, positions: Any, folds: int, seed: int
) -> Capture:
    """Refuse what `fit` would refuse of any engine, before one is started; return what it would capture."""
    from vllm_weir.experiments.fit.engine import parse_capture
    from vllm_weir.experiments.fit.run import check_options
    from vllm_weir.fitting.methods import method_of

    method_of(method, *counts)
    check_options(folds, seed)
    return parse_capture(hook, layers, positions)


def _metric(answer: str | None, wrong: str | None, check: bool) -> Any:
    from vllm_weir.experiments.metrics import logit_diff

    if (answer is None) != (wrong is None):
        raise WeirError("--answer and --wrong go together", "wrong" if wrong is None else "answer")
    if answer is not None and not check:
        raise WeirError("it is what the check looks at; leave it out, or --no-check", "answer")
    return None if answer is None else logit_diff(answer, wrong)


def _show(found: Any, files: list[str], as_json: bool) -> None:
    areas = found.auc_by_layer
    if as_json:
        result = {"method": found.method, "hook": found.hook, "convention": found.convention, "details": found.details}
        typer.echo(json.dumps(result | {"auc": areas, "best": found.best if areas else None, "files": files}))
        return
    counts = found.details["prompts"]
    typer.echo(
        f"{found.method} at {found.hook}: {counts['positive']:,} positive and {counts['negative']:,} negative prompts, "
        f"{len(found.layers)} blocks"
    )
    for layer in sorted(areas or (), key=lambda one: -areas[one])[:5]:
        dose = found.details["layers"][str(layer)]["relative_dose"]
        typer.echo(
            f"  block {layer}: AUC {areas[layer]:.3f}, distance between the classes {dose:.3f} of a row's length"
        )
    check = found.details.get("causal", {})
    if "skipped" in check:
        typer.echo(f"no check: {check['skipped']}")
    elif check:
        shares = {name: check[name] for name in ("added", "subtracted", "left_after_ablation")}
        told = ", ".join(
            f"{name.replace('_', ' ')} {share:+.0%}" for name, share in shares.items() if share is not None
        )
        typer.echo(
            f"check at block {check['layer']}, {check['readout']}, of the difference between the classes: {told}"
        )
    for file in files:
        typer.echo(f"-> {file}")
