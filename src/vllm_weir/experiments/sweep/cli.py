"""The command ``weir sweep``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import numpy as np
import typer

from vllm_weir.errors import WeirError
from vllm_weir.schema.model_facts import ModelConfig
from vllm_weir.storage.cli import exit_on_error, parse_engine_options, parse_ints, parse_positions
from vllm_weir.util.shipped import HELP
from vllm_weir.util.start_llm import start_llm
from vllm_weir.util.text_lines import read_json_lines

if TYPE_CHECKING:
    from vllm_weir.experiments.sweep.result import Sweep


class Prompts(NamedTuple):
    """The pairs of prompts, and the tokens of the metric for each."""

    clean: list[str]
    corrupt: list[str]
    answers: list[Any]
    wrong: list[Any]


def sweep(
    model: Annotated[str, typer.Argument(help=HELP)],
    clean: Annotated[str | None, typer.Option(help="Prompt to which --answer fits.")] = None,
    corrupt: Annotated[str | None, typer.Option(help="Prompt to which --wrong fits.")] = None,
    answer: Annotated[str | None, typer.Option(help="Token a of the metric logit(a) - logit(b).")] = None,
    wrong: Annotated[str | None, typer.Option(help="Token b of the metric.")] = None,
    pairs: Annotated[
        str | None, typer.Option(help="JSONL file of several: objects with clean, corrupt, answer, wrong.")
    ] = None,
    hooks: Annotated[str, typer.Option("--hook", help="Hook points with commas.")] = "resid_post",
    layers: Annotated[str, typer.Option(help="'all', or ints with commas.")] = "all",
    positions: Annotated[str, typer.Option(help="all: a cell for each token; last_prompt, 4:7, or JSON.")] = "all",
    heads: Annotated[str | None, typer.Option(help="'all', or ints with commas: a cell for each. [whole rows]")] = None,
    mode: Annotated[str, typer.Option(help="denoise: clean rows into the corrupt run; noise: reverse.")] = "denoise",
    to: Annotated[str | None, typer.Option(help="Receiver of a path, such as q.5.")] = None,
    to_heads: Annotated[str | None, typer.Option(help="Heads of the receiver: ints with commas. [all]")] = None,
    freeze: Annotated[str | None, typer.Option(help="What a path holds still, with commas. [attn_out,mlp_out]")] = None,
    lora: Annotated[str | None, typer.Option(help="Folder of a LoRA adapter, under which all runs are made.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="File to continue from after an interruption.")] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="File for the result (.npz).")] = None,
    plot: Annotated[str | None, typer.Option(help="File for heat maps: .png, .svg or .html.")] = None,
    engine: Annotated[
        list[str] | None, typer.Option("--engine", "-e", help="Option of vllm.LLM: key=value, or a JSON object.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Patch rows of one prompt into the run of another, place by place, and measure each run.

    Exit code 0: done; 1: refused or failed.
    """
    with exit_on_error():
        from vllm_weir.experiments.adapter import options_under
        from vllm_weir.experiments.metrics import logit_diff
        from vllm_weir.experiments.sweep.run import check_arguments
        from vllm_weir.experiments.sweep.run import sweep as run

        _check_files(out, plot)
        prompts = _prompts(clean, corrupt, answer, wrong, pairs)
        receiver, held = _path(to, to_heads, freeze)
        picked = {
            "layers": layers if layers == "all" else parse_ints(layers, "'all' or ints", "layers"),
            "heads": heads if heads == "all" else parse_ints(heads, "'all' or ints", "heads"),
        }
        check_arguments(hooks.split(","), picked["layers"], parse_positions(positions), mode, receiver, held)
        options = options_under(lora, parse_engine_options(engine or []))
        _check_model(ModelConfig.read(model, options), hooks.split(","), picked, receiver)
        result = run(
            start_llm(model, options), prompts.clean, prompts.corrupt, hooks.split(","),
            positions=parse_positions(positions), metric=logit_diff(prompts.answers, prompts.wrong),
            mode=cast(Any, mode), to=receiver, freeze=held, checkpoint=checkpoint, progress=not quiet, **picked,
            **({} if lora is None else {"lora": lora}),
        )  # fmt: skip
        if out is not None:
            result.save(out)
        files = [] if plot is None else [str(file) for file in result.plot(plot)]
    _show(result, [] if out is None else [out], files, as_json)


def _check_files(out: str | None, plot: str | None) -> None:
    """Refuse files that cannot be written, while nothing is lost."""
    from vllm_weir.experiments.plots import check_output, check_plot

    if out is not None:
        check_output(out, "out")
    if plot is not None:
        check_plot(plot)


def _check_model(config: ModelConfig, hooks: list[str], picked: dict[str, Any], receiver: Any) -> None:
    from vllm_weir.schema.capture import parse_layers
    from vllm_weir.schema.hooks import normalise_hook

    config.check_layers(normalise_hook(hooks[0], "hooks"), parse_layers(picked["layers"], "layers"))
    config.check_heads(picked["heads"])
    if receiver is not None:
        config.check_layers(receiver[0], (receiver[1],), "to")
        config.check_heads(receiver[2], "to_heads")


def _path(to: str | None, to_heads: str | None, freeze: str | None) -> tuple[Any, Any]:
    """Return the receiver of a path, None for no path, and what is held still on it, None for the default."""
    from vllm_weir.schema.hooks import parse_site

    if to is None and to_heads is not None:
        raise WeirError("it is for a path; give its receiver, --to, or leave it out", "to_heads")
    receiver = None if to is None else (*parse_site(to), parse_ints(to_heads, "ints", "to_heads"))
    return receiver, None if freeze is None else freeze.split(",")


def _prompts(
    clean: str | None, corrupt: str | None, answer: str | None, wrong: str | None, pairs: str | None
) -> Prompts:
    given = {"clean": clean, "corrupt": corrupt, "answer": answer, "wrong": wrong}
    if pairs is None:
        for name, value in given.items():
            if value is None:
                raise WeirError("missing; give it, or a file of pairs (--pairs)", name)
        return Prompts(*([value] for value in given.values()))  # type: ignore[arg-type]
    for name, value in given.items():
        if value is not None:
            raise WeirError("the pairs come from a file (--pairs); leave it out", name)
    records = list(read_json_lines(pairs, "pairs"))
    for where, record in records:
        if not isinstance(record, dict) or (missing := set(given) - set(record)):
            lacks = f"lacks {min(missing)!r}" if isinstance(record, dict) else f"is a {type(record).__name__}"
            raise WeirError(f"{where} {lacks}; each line is an object with {', '.join(given)}", "pairs")
    prompts = Prompts(*([record[name] for _, record in records] for name in given))
    if not prompts.clean:
        raise WeirError(f"there are no pairs in {pairs}", "pairs")
    return prompts


def _show(result: Sweep, saved: list[str], plots: list[str], as_json: bool) -> None:
    files = saved + plots
    if as_json:
        axes = {name: list(labels) for name, labels in result.grid.axes.items()}
        typer.echo(
            json.dumps(
                {"axes": axes, "grid": result.grid.array.tolist(), "baseline": result.baseline._asdict()}
                | {"noise_floor": result.noise_floor, "mode": result.mode, "files": files}
            )
        )
        return
    clean, corrupt = result.baseline
    typer.echo(f"{result.metric}: clean {clean:.4g}, corrupt {corrupt:.4g}, noise floor {result.noise_floor:.2g}")
    base = corrupt if result.mode == "denoise" else clean
    effects = abs(result.grid.array - base)
    for flat in effects.argsort(axis=None)[::-1][:5].tolist():
        index = np.unravel_index(flat, result.grid.shape)
        labels = (f"{name} {values[i]}" for (name, values), i in zip(result.grid.axes.items(), index, strict=True))
        typer.echo(f"  {', '.join(labels)}: {result.grid.array[index]:.4g}")
    for file in files:
        typer.echo(f"-> {file}")
