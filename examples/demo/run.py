"""The demo: find where a fact is, read the mood of stories, and change it."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import vllm_weir as weir
from examples.demo import steering
from examples.demo.fact import ANSWERS, MIN_SHARE, Fact, find_fact, print_fact
from examples.demo.pictures import HeatMap, doses, heat_maps
from examples.demo.reading import SAMPLED, StoryRows, compiler, read, start_engine
from examples.demo.reference import parameter_count, reference_rows, worst_error
from examples.demo.stories import Story, make_stories
from vllm_weir.demo import probe as pr
from vllm_weir.util.shipped import NAME, model_path

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
console = Console(highlight=False, soft_wrap=True)

MIN_RIGHT, MAX_ERROR = 0.9, 1e-5
"""The shipped model must reach these, else the exit code is 1."""
LARGE = 1_000_000_000
"""Models with more parameters are not compared with transformers in fp32 on the CPU."""
TRAIN_SEED, HELD_OUT_SEED = 2001, 2002
COMPARED = 4
NEXT = """Next:
  .venv/bin/weir serve demo                        this model with a page of sliders, in a browser
  make demo MODEL=<directory or hub id>            the same on a model of yours
  docs/tutorial.md                                 capture, probe and steer with a few lines of Python"""


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
    """Find where a model has a fact, read the mood of stories off its rows, and change the mood of new ones."""
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

    fact, pictures = _fact(llm, out)

    stories = make_stories(train, TRAIN_SEED), make_stories(held_out, HELD_OUT_SEED)
    shown = [_first(stories[1], mood) for mood in ("positive", "negative")]
    keep = list(dict.fromkeys([*shown, *range(COMPARED)]))
    with Progress(
        TextColumn("reading stories"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as bar:
        task = bar.add_task("", total=train + held_out)
        train_rows, held_rows = (
            read(llm, part, kept, lambda n: bar.advance(task, n))
            for part, kept in zip(stories, ((), keep), strict=True)
        )
    _print_cost(train_rows, held_rows)

    labels, held_labels = (torch.tensor([s.sentiment == "positive" for s in part]) for part in stories)
    # Tokens of one story are alike, so the penalty is large.
    probes = [pr.fit_probe(rows, labels.repeat_interleave(SAMPLED), l2=0.05) for rows in train_rows.sampled]
    right = _right(train_rows.ends, labels, held_rows.ends, held_labels)
    _print_right(right, held_out)

    error = _compare(model, held_rows, parameters)
    words = [[llm.get_tokenizer().decode([i]).strip() or "␣" for i in ids] for ids in held_rows.tokens]
    pictures.append(_draw_scores(probes, held_rows, words, [stories[1][i] for i in shown], out))
    dose_results = _steer(llm, train_rows, probes, labels, shipped)
    pictures.append(doses(dose_results, shipped, out / "steered_stories.png"))
    console.print("Pictures: " + "\n          ".join(map(str, pictures)), end="")
    console.print(f"   ({time.perf_counter() - started:.0f} s in all)")
    console.print("Blue is she and happy, red is he and sad, in all of them.")
    console.print(NEXT, markup=False)
    if shipped and not _meets_expectations(fact, max(end for _, end in right) / held_out, error, dose_results):
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


def _fact(llm: Any, out: Path) -> tuple[Fact | None, list[Path]]:
    """Look for the fact, print and draw where it is; (None, []) if the model does not have it."""
    try:
        with console.status("looking for a fact"):
            fact = find_fact(llm)
    except weir.WeirError as e:
        console.print(f"No fact was looked for: {e}", markup=False)
        return None, []
    print_fact(console, fact)
    she, he = (answer.strip() for answer in ANSWERS)
    heads = [str(head) for head in range(fact.by_head.shape[1])]
    panels = [
        HeatMap("The row after a block, at a token", fact.words, torch.tensor(fact.by_place)),
        HeatMap("One head's output at the last token", heads, torch.tensor(fact.by_head), "head"),
    ]
    caption = f"share of the answer {she} that is restored\n(0: still {he})"
    return fact, [heat_maps(panels, out / "where_a_fact_is.png", caption, limit=1.0, beside=True)]


def _right(
    train: torch.Tensor, labels: torch.Tensor, held_out: torch.Tensor, held_labels: torch.Tensor
) -> list[tuple[int, int]]:
    """Return for each block how many stories a probe of last tokens reads right.

    It is asked at the end of the opening, and at the end of the story: rows are [blocks, stories, 2, d].
    """
    out = []
    for train_rows, rows in zip(train, held_out, strict=True):
        probe = pr.fit_probe(train_rows[:, 1], labels)
        right = (probe.score(rows) > 0) == held_labels[:, None]
        opening, end = right.sum(0).tolist()
        out.append((opening, end))
    return out


def _print_cost(train_rows: StoryRows, held_rows: StoryRows) -> None:
    count, seconds = train_rows.count + held_rows.count, train_rows.seconds + held_rows.seconds
    megabytes = (train_rows.size + held_rows.size) / 1e6
    console.print(
        f"Captured {count:,} rows ({megabytes:.0f} MB, resid_post of {len(train_rows.ends)} blocks at "
        f"every prompt token) in {seconds:.1f} s: {count / seconds:,.0f} rows/s, delivered as tensors"
    )


def _print_right(right: list[tuple[int, int]], stories: int) -> None:
    table = Table(title="Is the story happy? What a linear probe reads right in stories held out", title_justify="left")
    for head in ("block", "after the opening,\nwhich says nothing", "after the\nlast word"):
        table.add_column(head, justify="right")
    best = max(range(len(right)), key=lambda block: right[block][1])
    for block, counts in enumerate(right):
        table.add_row(
            str(block), *(f"{count} of {stories}" for count in counts), style="bold" if block == best else None
        )
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


def _draw_scores(
    probes: list[pr.LogisticProbe], held_rows: StoryRows, words: list[list[str]], shown: list[Story], out: Path
) -> Path:
    """Draw what the probes read at each word of the stories that are shown."""
    moods = {"positive": "happy", "negative": "sad"}
    panels = [
        HeatMap(
            f"A {moods[story.sentiment]} story",
            tokens[1:],
            torch.stack([probe.score(row) for probe, row in zip(probes, rows, strict=True)])[:, 1:],
        )
        for story, rows, tokens in zip(shown, held_rows.rows, words, strict=False)
    ]
    caption = "log-odds that the story\nis happy (blue) or sad (red)"
    return heat_maps(panels, out / "mood_by_word.png", caption)


def _steer(
    llm: Any, train_rows: StoryRows, probes: list[pr.LogisticProbe], labels: torch.Tensor, shipped: bool
) -> list[steering.DoseResult]:
    """Write and print stories steered along the difference of the moods' mean rows."""
    layer = len(probes) // 2
    vector = pr.mean_difference(train_rows.mean[layer], labels)
    with console.status("writing steered stories"):
        dose_results = steering.write_stories(llm, vector, layer, probes[layer], console)
    steering.print_doses(console, dose_results, layer, float(vector.norm()), grammar=shipped)
    steering.print_story(console, dose_results)
    return dose_results


def _meets_expectations(
    fact: Fact | None, right: float, error: float | None, dose_results: list[steering.DoseResult]
) -> bool:
    unmet = steering.failures(dose_results)
    share = 0.0 if fact is None else float(fact.by_head.max())
    if share < MIN_SHARE:
        unmet.append(f"the strongest head restores {share:.2f}, less than {MIN_SHARE}")
    if right < MIN_RIGHT:
        unmet.append(f"the best block's probe is right for {right:.2f} of the stories, less than {MIN_RIGHT}")
    if error is None or error > MAX_ERROR:
        unmet.append(f"the error against transformers is {error}, more than {MAX_ERROR:g}")
    for sentence in unmet:
        console.print(f"[red]FAILED[/]: {sentence}")
    return not unmet
