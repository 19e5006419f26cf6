"""The demo: capture rows of stories, fit a probe at each layer, then steer along its direction."""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.demo import steering
from examples.demo.pictures import TokenScores, curves, doses, heat_map
from examples.demo.reading import SAMPLED, StoryRows, compiler, read, start_engine
from examples.demo.reference import parameter_count, reference_rows, worst_error
from vllm_weir.demo import probe as pr
from vllm_weir.demo.stories import Story, make_stories
from vllm_weir.util.shipped import NAME, model_path

app = typer.Typer(add_completion=False)
console = Console(highlight=False, soft_wrap=True)

MIN_AUC, MAX_ERROR = 0.95, 1e-5
"""The shipped model must reach these, else the exit code is 1."""
LARGE = 1_000_000_000
"""Models with more parameters are not compared with transformers in fp32 on the CPU."""
TRAIN_SEED, HELD_OUT_SEED = 2001, 2002
COMPARED = 4


@dataclass(frozen=True)
class LayerResult:
    """Held-out measures of one layer's probes."""

    auc_last: float
    auc_mean: float
    accuracy: float
    cosine: float


@app.command()
def main(
    model: Annotated[str, typer.Argument(help="Directory or hub id of the model, or demo.")] = NAME,
    train: Annotated[int, typer.Option(help="Stories to fit the probes on.", min=20)] = 200,
    held_out: Annotated[int, typer.Option(help="Stories to measure them on.", min=10)] = 100,
    out: Annotated[Path, typer.Option(help="Where the pictures go.")] = Path("out/demo"),
    compiled: Annotated[
        bool | None, typer.Option("--compile/--eager", help="With torch.compile or without; default: with on a GPU.")
    ] = None,
) -> None:
    """Read stories with vLLM, fit a linear probe per layer on the captured rows, and steer the mood of new ones."""
    started = time.perf_counter()
    model = model_path(model)
    shipped = Path(model).resolve() == Path(model_path(NAME)).resolve()
    _quiet(model)
    try:
        parameters = parameter_count(model)
    except OSError as e:
        raise typer.BadParameter(f"no model at {model}: {str(e).splitlines()[0]}", param_hint="MODEL") from None
    small = parameters is not None and parameters <= LARGE
    if compiled is None:
        # On CPU compiling takes longer than the demo itself.
        compiled = torch.cuda.is_available()
    if compiled and not torch.cuda.is_available() and compiler() is None:
        raise typer.BadParameter(
            "torch.compile needs a C++ compiler on CPU, and there is none on PATH", param_hint="--compile"
        )

    name = "the model that ships with Weir" if shipped else model
    size = f"{parameters / 1e6:.1f} M parameters" if parameters else "size unknown"
    console.print(f"[bold]Weir demo[/] on {name} ({size})")
    with console.status("starting vLLM" + (" and compiling the model" if compiled else "")):
        llm = start_engine(model, "float32" if small else "auto", eager=not compiled)
    how = "with torch.compile" if compiled else "without torch.compile (--compile for it)"
    console.print(f"vLLM is up after {time.perf_counter() - started:.0f} s, {how}")

    stories = make_stories(train, TRAIN_SEED), make_stories(held_out, HELD_OUT_SEED)
    shown = [_first(stories[1], "positive"), _first(stories[1], "negative")]
    keep = list(dict.fromkeys([*shown, *range(COMPARED)]))
    with Progress(
        TextColumn("reading stories"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as bar:
        task = bar.add_task("", total=train + held_out)
        train_rows, held_rows = (
            read(llm, [s.text for s in part], kept, lambda n: bar.advance(task, n))
            for part, kept in zip(stories, ((), keep), strict=True)
        )
    _print_cost(train_rows, held_rows)

    labels = tuple(torch.tensor([s.sentiment == "positive" for s in part]) for part in stories)
    probes, results = _fit(train_rows, held_rows, *labels)
    _print_results(results)

    error = _compare(model, held_rows, parameters)
    words = [[llm.get_tokenizer().decode([i]).strip() or "␣" for i in ids] for ids in held_rows.tokens]
    pictures = [*_draw(probes, results, held_rows, words, [stories[1][i] for i in shown], out)]
    dose_results = _steer(llm, train_rows, probes, labels[0], shipped)
    pictures.append(_draw_doses(dose_results, shipped, out))
    console.print("Pictures: " + "\n          ".join(map(str, pictures)), end="")
    console.print(f"   ({time.perf_counter() - started:.0f} s in all)")
    if shipped and not _meets_expectations(results, error, dose_results):
        raise typer.Exit(1)


def _quiet(model: str) -> None:
    """Set the environment variables that vLLM and the hub client read on import."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not torch.cuda.is_available():
        # Importing vLLM in a second process would take most of the demo's time on CPU.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning,ignore::DeprecationWarning")
    warnings.filterwarnings("ignore", category=FutureWarning)
    if Path(model).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _first(stories: list[Story], sentiment: str) -> int:
    return next(i for i, story in enumerate(stories) if story.sentiment == sentiment)


def _fit(
    train_rows: StoryRows, held_rows: StoryRows, labels: torch.Tensor, held_labels: torch.Tensor
) -> tuple[list[pr.LogisticProbe], list[LayerResult]]:
    """Fit a probe for any token at each layer, and measure probes on last tokens and on means."""
    probes, results = [], []
    for layer in range(len(train_rows.last)):
        of_last = pr.fit_probe(train_rows.last[layer], labels)
        of_mean = pr.fit_probe(train_rows.mean[layer], labels)
        scores = of_last.score(held_rows.last[layer])
        results.append(
            LayerResult(
                auc_last=pr.auc(scores, held_labels),
                auc_mean=pr.auc(of_mean.score(held_rows.mean[layer]), held_labels),
                accuracy=pr.accuracy(scores, held_labels),
                cosine=pr.cosine(of_last.weight, pr.mean_difference(train_rows.last[layer], labels)),
            )
        )
        # Tokens of one story are alike, so this probe needs a larger penalty.
        probes.append(pr.fit_probe(train_rows.sampled[layer], labels.repeat_interleave(SAMPLED), l2=0.05))
    return probes, results


def _print_cost(train_rows: StoryRows, held_rows: StoryRows) -> None:
    count, seconds = train_rows.count + held_rows.count, train_rows.seconds + held_rows.seconds
    megabytes = (train_rows.size + held_rows.size) / 1e6
    console.print(
        f"Captured {count:,} rows ({megabytes:.0f} MB, resid_post of {len(train_rows.last)} layers at "
        f"every prompt token) in {seconds:.1f} s: {count / seconds:,.0f} rows/s, delivered as tensors"
    )


def _print_results(results: list[LayerResult]) -> None:
    table = Table(title="Is the story happy? Linear probes, held-out stories", title_justify="left")
    table.add_column("layer", justify="right")
    for head in ("AUC\nlast token", "AUC\nmean of tokens", "accuracy\nlast token", "cosine to\nmean difference"):
        table.add_column(head, justify="right")
    best = max(range(len(results)), key=lambda i: results[i].auc_last)
    for layer, r in enumerate(results):
        cells = (f"{r.auc_last:.3f}", f"{r.auc_mean:.3f}", f"{r.accuracy:.2f}", f"{r.cosine:+.2f}")
        table.add_row(str(layer), *cells, style="bold" if layer == best else None)
    console.print(table)


def _compare(model: str, held_rows: StoryRows, parameters: int | None) -> float | None:
    """Print and return the error against transformers, or None if it was not measured."""
    if parameters is None or parameters > LARGE:
        why = "transformers cannot build this model" if parameters is None else "the model has over 1 B parameters"
        console.print(f"Not compared with transformers: {why}")
        return None
    with console.status("comparing with transformers"):
        error = worst_error(held_rows.rows, reference_rows(model, held_rows.tokens))
    rows = sum(r.shape[0] * r.shape[1] for r in held_rows.rows)
    console.print(f"Against transformers in fp32, {rows:,} rows: max|difference| / max|reference| = {error:.1e}")
    return error


def _draw(
    probes: list[pr.LogisticProbe],
    results: list[LayerResult],
    held_rows: StoryRows,
    words: list[list[str]],
    shown: list[Story],
    out: Path,
) -> tuple[Path, Path]:
    texts = []
    for story, rows, tokens in zip(shown, held_rows.rows, words, strict=False):
        scores = torch.stack([probe.score(r) for probe, r in zip(probes, rows, strict=True)])[:, 1:]
        texts.append(TokenScores(f"A {story.sentiment} held-out story", tokens[1:], scores))
    caption = "log-odds that the story\nis positive (blue) or negative (red)"
    return (
        heat_map(texts, out / "probe_scores.png", caption),
        curves(
            {"last token": [r.auc_last for r in results], "mean of tokens": [r.auc_mean for r in results]},
            out / "auc_per_layer.png",
            "held-out AUC",
        ),
    )


def _steer(
    llm: Any, train_rows: StoryRows, probes: list[pr.LogisticProbe], labels: torch.Tensor, shipped: bool
) -> list[steering.DoseResult]:
    """Write and print stories steered along the difference of the sentiments' mean rows."""
    layer = len(probes) // 2
    vector = pr.mean_difference(train_rows.mean[layer], labels)
    with console.status("writing steered stories"):
        dose_results = steering.write_stories(llm, vector, layer, probes[layer], console)
    steering.print_doses(console, dose_results, layer, float(vector.norm()), grammar=shipped)
    steering.print_story(console, dose_results)
    return dose_results


def _draw_doses(dose_results: list[steering.DoseResult], shipped: bool, out: Path) -> Path:
    shares = {
        "positive": [dose.share(1) for dose in dose_results],
        "negative": [dose.share(-1) for dose in dose_results],
    }
    if shipped:
        shares["well-formed"] = [dose.well_formed for dose in dose_results]
    scores = [[story.score for story in dose.stories] for dose in dose_results]
    return doses(
        [dose.scale for dose in dose_results], shares, scores, out / "dose_response.png", "probe's log-odds of positive"
    )


def _meets_expectations(
    results: list[LayerResult], error: float | None, dose_results: list[steering.DoseResult]
) -> bool:
    best = max(r.auc_last for r in results)
    unmet = steering.failures(dose_results)
    for sentence in unmet:
        console.print(f"[red]FAILED[/]: {sentence}")
    if best < MIN_AUC:
        console.print(f"[red]FAILED[/]: the best layer's AUC is {best:.3f}, less than {MIN_AUC}")
    if error is None or error > MAX_ERROR:
        console.print(f"[red]FAILED[/]: the error against transformers is {error}, more than {MAX_ERROR:g}")
    return best >= MIN_AUC and error is not None and error <= MAX_ERROR and not unmet
