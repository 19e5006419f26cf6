"""``weir bench``, ``weir bench pool`` and ``weir bench report``."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from vllm_weir.bench.cases import CASES, DEFAULT_CASES, SETS, SYSTEMS
from vllm_weir.bench.plan import BenchPlan, WorkloadSizes

if TYPE_CHECKING:
    from vllm_weir.bench.result import BenchResult

app = typer.Typer(add_completion=False, invoke_without_command=True, help="Time and check Weir beside others.")
console = Console(highlight=False, soft_wrap=True)
SMALL_WORKLOADS = WorkloadSizes(
    texts=12, shortest=8, longest=60, long=200, medium=80, short=40, chats=8, system_prompt=64, chat_tokens=16,
    ablated=4, ablated_tokens=16, crowd=6, cells=12, cell_tokens=6, generated=16,
)  # fmt: skip
"""For a CPU, and for `--smoke`."""
NO_PLOTS = "matplotlib is not installed; it comes with vllm-weir's extra named plot"


def refused(why: str) -> typer.Exit:
    """Print in one line why the options are refused; return what ends the command."""
    typer.echo(f"Error: {why}", err=True)
    return typer.Exit(2)


@app.callback()
def bench(
    context: typer.Context,
    systems: Annotated[
        str | None,
        typer.Option(
            help=f"Systems, with commas: {', '.join(SYSTEMS)}. [all that are there; with --against: stock,weir]"
        ),
    ] = None,
    cases: Annotated[
        str | None,
        typer.Option(
            help=f"Cases, with commas: {', '.join(CASES)}; {', '.join(SETS)} name several. "
            f"[{', '.join(DEFAULT_CASES)}; with --against: "
            "the cases of the file]"
        ),
    ] = None,
    batches: Annotated[
        str | None, typer.Option(help="Numbers of requests at once, with commas, or 'none'. [1,32,256; CPU: 1,4]")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens that each request generates. [128; CPU: 16]", min=2)
    ] = None,
    prefill: Annotated[
        str | None, typer.Option(help="Prompts x tokens of the prefill case, or 'none'. [64x1024; CPU: 4x64]")
    ] = None,
    texts: Annotated[
        int | None, typer.Option(help="Texts of the cases that read texts. [1500; CPU: 12]", min=1)
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Tokens of the shortest and the longest text. [50-600; CPU: 8-60]")
    ] = None,
    blocks: Annotated[int | None, typer.Option(help="Blocks that the case extract reads. [4]", min=1)] = None,
    long: Annotated[
        int | None, typer.Option(help="Tokens of the prompt of the cases long and long_one. [32000; CPU: 200]", min=2)
    ] = None,
    chats: Annotated[int | None, typer.Option(help="Chats of the case chat_mix. [128; CPU: 8]", min=8)] = None,
    system_prompt: Annotated[
        int | None, typer.Option(help="Tokens of the system prompt that the chats share. [2000; CPU: 64]", min=1)
    ] = None,
    ablated: Annotated[
        int | None, typer.Option(help="Requests of the cases ablate_everywhere and instruments. [64; CPU: 4]", min=1)
    ] = None,
    d_sae: Annotated[
        int | None, typer.Option(help="Features of the autoencoder that is read. [32768; CPU: 512]", min=32)
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each case.", min=1)] = 5,
    warmups: Annotated[int, typer.Option(help="Runs of each case before the timed ones.", min=0)] = 2,
    model: Annotated[
        str | None, typer.Option(help="Model: llama-8b, demo, or a directory. [llama-8b; CPU: demo]")
    ] = None,
    out: Annotated[Path, typer.Option(help="File for the result, JSON.")] = Path("bench/results/latest.json"),
    markdown: Annotated[
        Path | None, typer.Option(help="File for the result as a Markdown table. [beside --out]")
    ] = None,
    chart: Annotated[Path | None, typer.Option(help="Files for a chart: NAME.svg and NAME.png. [beside --out]")] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            help="File of an earlier result: fail where a ratio to stock is worse. Sizes not named are the file's."
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="Percent by which a ratio may be worse than in --against.", min=0)
    ] = 2.0,
    weir_config: Annotated[str, typer.Option(help='additional_config["weir"], JSON.')] = "{}",
    case_seconds: Annotated[float, typer.Option(help="Most seconds of a case.", min=1)] = 120.0,
    run_seconds: Annotated[
        float | None, typer.Option(help="Most seconds of all; what is left undone is named.", min=1)
    ] = None,
    startups: Annotated[int, typer.Option(help="Number of fresh processes in which the start is timed.", min=1)] = 1,
    cold: Annotated[bool | None, typer.Option("--cold/--cached", help="Compile at every start. [CPU: cached]")] = None,
    interleave: Annotated[bool, typer.Option(help="Stock and Weir take turns, run by run.")] = True,
    memory_share: Annotated[float, typer.Option(help="Share of the GPU's memory for each engine.")] = 0.42,
    eager: Annotated[
        bool | None,
        typer.Option("--eager/--compile", help="Whether torch.compile and CUDA graphs are off. [CPU: eager]"),
    ] = None,
    lens_path: Annotated[str | None, typer.Option(help="Folder with vllm-lens, if it is not installed.")] = None,
    rivals_path: Annotated[
        str | None, typer.Option(help="Folder with nnsight, interp-engine or hotwire, if they are not installed.")
    ] = None,
    smoke: Annotated[bool, typer.Option(help="The smallest run that uses everything; proves no speed.")] = False,
) -> None:
    """Time stock vLLM, Weir and others on the same prompts, with checked rows; JSON, table and chart.

    Exit code 1 if a check failed, a system could not start, or a case is slower than the result of --against says; what
    is not installed is skipped: the file says why.
    """
    if context.invoked_subcommand is not None:
        return
    _check_chart(chart)
    cuda = _has_gpu()
    small = smoke or not cuda
    before = _results([against])[0] if against is not None else None
    sizes = before.runs[0] if before is not None and before.runs else {}
    if before is not None:
        of_file = {c.case for c in before.cases if c.system == "weir"}
        systems, cases = systems or "stock,weir", cases or ",".join(c for c in CASES if c in of_file)
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as work:
        settings = model_fields(model or ("demo" if small else "llama-8b"), Path(work), cuda)
        settings |= {
            "systems": _systems(systems),
            "cases": _names(cases or ",".join(DEFAULT_CASES), CASES, "--cases", SETS),
            "batches": _ints(batches, "--batches")
            if batches
            else sizes.get("batches", (1, 4) if small else (1, 32, 256)),
            "tokens": tokens or sizes.get("tokens", 16 if small else 128),
            "d_sae": d_sae or sizes.get("d_sae", 512 if small else 32_768),
            "prefill": _product(prefill) if prefill else sizes.get("prefill", (4, 64) if small else (64, 1024)),
            "repeats": min(repeats, 2) if smoke else repeats,
            "warmups": min(warmups, 1) if smoke else warmups,
            "least_seconds": 0.0 if small else 2.0,
            "cuda": cuda,
            "eager": (not cuda) if eager is None else eager,
            "cold": (cuda and not smoke) if cold is None else cold,
            "weir_config": _object(weir_config),
            "lens_path": lens_path,
            "rivals_path": rivals_path,
            "workloads": _workload_sizes(
                SMALL_WORKLOADS if small else WorkloadSizes(),
                sizes.get("workloads", {}),
                settings["layers"],
                texts=texts,
                blocks=blocks,
                long=long,
                chats=chats,
                system_prompt=system_prompt,
                ablated=ablated,
                generated=tokens,
                **_lengths(lengths),
            ),
            "case_seconds": case_seconds,
            "run_seconds": run_seconds,
        }
        settings |= {"startups": startups, "interleave": interleave, "memory_share": memory_share}
        beside = out.with_suffix("") if _can_draw() else None
        plan = BenchPlan(**settings)
        if before is not None:
            _check_comparable(before, plan)
        _run(plan, out, Path(work), markdown or out.with_suffix(".md"), chart or beside, before, tolerance)


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="Result files of one device; ratios stay within each run.")],
    out: Annotated[Path | None, typer.Option(help="File for all results as one.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="File for a Markdown table. [printed]")] = None,
    chart: Annotated[
        Path | None, typer.Option(help="Files for a chart: NAME.svg and NAME.png (needs matplotlib).")
    ] = None,
) -> None:
    """Merge result files, and draw a Markdown table and a chart."""
    from vllm_weir.bench.report import as_markdown
    from vllm_weir.bench.result import mark_checks, merge

    _check_chart(chart)
    try:
        result = merge(_results(files))
    except ValueError as e:
        raise refused(str(e)) from None
    mark_checks(result)
    if out is not None:
        result.save(out)
    if markdown is None:
        typer.echo(as_markdown(result))
    _show(result, markdown, chart)


@app.command()
def pool(
    files: Annotated[list[Path], typer.Argument(help="Result files of one device, one run each.")],
    out: Annotated[Path, typer.Option(help="File for all runs as one.")],
    cases: Annotated[str | None, typer.Option(help="Which cases to take. [all]")] = None,
) -> None:
    """Make one run of several runs of the same cases: each ratio is the median of the runs' own."""
    from vllm_weir.bench.result import pool as pooled

    try:
        result = pooled(_results(files), None if cases is None else _names(cases, CASES, "--cases"))
    except ValueError as e:
        raise refused(str(e)) from None
    result.save(out)
    console.print(f"{out}: {len(result.cases)} figures of {len(files)} runs")


def _show(result: BenchResult, markdown: Path | None, chart: Path | None) -> None:
    from vllm_weir.bench.report import as_markdown

    if markdown is not None:
        markdown.parent.mkdir(parents=True, exist_ok=True)
        markdown.write_text(as_markdown(result))
        console.print(f"[dim]{markdown}[/]")
    if chart is not None:
        from vllm_weir.bench.report import draw_chart

        for path in draw_chart(result, chart):
            console.print(f"[dim]{path}[/]")


def _results(files: list[Path]) -> list[BenchResult]:
    from vllm_weir.bench.result import BenchResult

    results = []
    for path in files:
        try:
            results.append(BenchResult.load(path))
        except (OSError, ValueError) as e:
            raise refused(f"{path} is no result file of `weir bench`: {e}") from None
    return results


def _run(
    plan: BenchPlan,
    out: Path,
    work: Path,
    markdown: Path,
    chart: Path | None,
    before: BenchResult | None,
    tolerance: float,
) -> None:
    import time

    _check_lengths(plan)
    from vllm_weir.bench.report import as_tables
    from vllm_weir.bench.runner import run_plan

    started = time.monotonic()
    with console.status("starting") as status:

        def say(text: str) -> None:
            status.update(text)
            console.print(f"[dim]{time.monotonic() - started:5.0f} s[/]  {text}", markup=True)

        result = run_plan(plan, out, work, say)
    for table in as_tables(result):
        console.print(table)
    for check in result.checks:
        mark = "[green]ok[/]" if check.passed else "[bold red]FAILED[/]"
        place = f"{check.system} {check.case} {check.size}"
        console.print(f"{mark} {place}: {check.what}: {check.value:.1e} (bound {check.bound:.0e})")
    console.print(f"{out}")
    _show(result, markdown, chart)
    if chart is None:
        console.print(f"[dim]no chart: {NO_PLOTS}[/]", markup=True)
    passed = result.passed and not any(s["status"] == "failed" for s in result.systems.values())
    if before is not None:
        from vllm_weir.bench.against import compare

        found = compare(before, result, plan, tolerance)
        console.print(found.table())
        *remarks, outcome = found.summary()
        for remark in remarks:
            console.print(remark, markup=False)
        console.print("[green]ok:[/]" if found.passed else "[bold red]FAILED:[/]", end=" ")
        console.print(outcome, markup=False)
        passed = passed and found.passed
    raise typer.Exit(0 if passed else 1)


def model_fields(name: str, work: Path, cuda: bool) -> dict[str, Any]:
    """Return the plan's fields about a model: ``llama-8b``, ``demo``, or a directory."""
    from transformers import AutoConfig

    from vllm_weir.bench.reference import make_model
    from vllm_weir.util.shipped import model_path

    dummy = name == "llama-8b"
    if dummy and not cuda:
        raise refused("--model: llama-8b needs a GPU; engines on a CPU repack their weights at the start")
    path = make_model(work / "llama-8b") if dummy else model_path(name)
    try:
        text = AutoConfig.from_pretrained(path).get_text_config()
    except (OSError, ValueError) as e:
        raise refused(f"--model: {name!r} cannot be read: {str(e).splitlines()[0]}") from None
    return {
        "model": path,
        "model_name": "Llama-3.1-8B shapes, random weights" if dummy else Path(name).name,
        "dummy": dummy,
        "layers": text.num_hidden_layers,
        "width": text.hidden_size,
        "vocab": text.vocab_size,
        "dtype": "bfloat16" if cuda else "float32",
        "max_model_len": min(2048, text.max_position_embeddings),
        "context": text.max_position_embeddings,
    }


def _can_draw() -> bool:
    """Return whether charts can be drawn; a run of an hour does not fail for want of that."""
    return importlib.util.find_spec("matplotlib") is not None


def _check_chart(chart: Path | None) -> None:
    if chart is not None and not _can_draw():
        raise refused(f"--chart: {NO_PLOTS}")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _workload_sizes(
    defaults: WorkloadSizes, earlier: dict[str, int], layers: int, **given: int | None
) -> WorkloadSizes:
    """Return the workloads' sizes: those that were given, else an earlier result's, else the defaults."""
    out = defaults.model_copy(update=earlier | {name: value for name, value in given.items() if value is not None})
    return out.model_copy(update={"cells": min(out.cells, layers * out.cell_tokens)})


def _check_comparable(before: BenchResult, plan: BenchPlan) -> None:
    from vllm_weir.bench.against import refusal
    from vllm_weir.bench.systems.stock import vllm_version

    if {"stock", "weir"} - set(plan.systems):
        raise refused("--systems: a comparison needs stock and weir")
    if (why := refusal(before, plan, vllm_version())) is not None:
        raise refused(f"--against: the file {why}")


def _lengths(text: str | None) -> dict[str, int]:
    if text is None:
        return {}
    try:
        shortest, longest = map(int, text.split("-"))
    except ValueError:
        shortest = longest = 0
    if not 1 <= shortest <= longest:
        raise refused(f"--lengths: expected 50-600, got {text!r}")
    return {"shortest": shortest, "longest": longest}


def _check_lengths(plan: BenchPlan) -> None:
    for size in plan.sizes() if plan.has_steps else ():
        if size.prompt + size.generated > plan.max_model_len:
            option = "--prefill" if size.kind == "prefill" else "--tokens"
            raise refused(f"{option}: {size.label}: the model takes at most {plan.max_model_len} tokens")
    options = {"texts": "--lengths", "long": "--long", "chats": "--system-prompt", "requests": "--tokens"}
    for size in plan.workload_sizes():
        if size.prompt + size.generated > plan.context:
            raise refused(f"{options[size.kind]}: {size.label}: the model takes at most {plan.context} tokens")


def _names(
    text: str, known: tuple[str, ...], option: str, sets: Mapping[str, tuple[str, ...]] = MappingProxyType({})
) -> tuple[str, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    names = [name for part in parts for name in sets.get(part, (part,))]
    for name in names:
        if name not in known:
            raise refused(f"{option}: {name!r} is none of {', '.join(known)}")
    if not names:
        raise refused(f"{option}: name at least one of {', '.join(known)}")
    return tuple(n for n in known if n in names)


def _systems(text: str | None) -> tuple[str, ...]:
    from vllm_weir.bench.systems import known_systems

    known = known_systems()
    names = _names(text or ",".join(known), SYSTEMS, "--systems")
    if absent := [name for name in names if name not in known]:
        raise refused(
            f"--systems: the adapter of {', '.join(absent)} comes with Weir's repository (bench/systems), not with the "
            "package; run weir bench from a checkout installed with pip install -e"
        )
    return names


def _ints(text: str, option: str) -> tuple[int, ...]:
    if text == "none":
        return ()
    try:
        found = tuple(sorted({int(part) for part in text.split(",") if part.strip()}))
    except ValueError:
        found = ()
    if not found or found[0] < 1:
        raise refused(f"{option}: expected ints from 1 on with commas, or none, got {text!r}")
    return found


def _product(text: str) -> tuple[int, int] | None:
    if text == "none":
        return None
    try:
        count, length = map(int, text.lower().split("x"))
    except ValueError:
        count = length = 0
    if count < 1 or length < 1:
        raise refused(f"--prefill: expected 64x1024 or none, got {text!r}")
    return count, length


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as e:
        raise refused(f"--weir-config: {e}") from None
    if not isinstance(value, dict):
        raise refused("--weir-config: expected a JSON object")
    return value
