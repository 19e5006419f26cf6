"""A user's function in every request: Weir's hooks, what Weir has built in, vllm-lens and nnsight in one table.

PYTHONPATH=src python3 bench/hooks.py --out bench/results/hooks_h100.json     # Llama-3.1-8B's shapes on a GPU
PYTHONPATH=src python3 bench/hooks.py                                         # the shipped model on a CPU

Each system has a process with an engine of its own, all at once; they take turns, call by call. Every request of a call
has the function at one block, at all positions, with a vector of its own, and generates greedily. `nothing` is a call
in which no request has one. Of each call the milliseconds a decode step, and the median of its ratios to stock vLLM's
in the same turn; `same` is the share of generated tokens that are those of Weir's hook. A system that is not installed
is named, with the reason; `--lens-path` and `--rivals-path` are put before PYTHONPATH for vllm-lens and nnsight.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vllm_weir.bench.cli import model_fields
from vllm_weir.bench.plan import BatchSize, BenchPlan, EngineChoice
from vllm_weir.bench.systems import known_systems

NOTHING = "nothing"
SYSTEMS = ("stock", "weir", "vllm-lens", "nnsight")


def push(rows: Any, ctx: Any) -> Any:
    """A nonlinear probe that steers."""
    return rows + torch.relu(rows @ ctx.args["w"])[:, None] * ctx.args["w"]


def clamp(rows: Any, ctx: Any) -> Any:
    """No row is longer than four times the vector."""
    most = 4 * ctx.args["w"].norm()
    return rows * (most / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)


def add(rows: Any, ctx: Any) -> Any:
    return rows + ctx.args["w"]


def ablate(rows: Any, ctx: Any) -> Any:
    unit = ctx.args["w"] / ctx.args["w"].norm()
    return rows - (rows @ unit)[:, None] * unit


FUNCTIONS = {"push": push, "clamp": clamp, "add": add, "ablate": ablate}
BUILT_IN = {"add": "Add", "ablate": "Ablate"}
MODES = ("eager", "compiled")
"""Of Weir's hooks."""


def ways(system: str, functions: list[str]) -> list[tuple[str, str]]:
    """(function, how) of every call of a system."""
    if system == "stock":
        return [(NOTHING, "")]
    found = [(NOTHING, "")] if system != "nnsight" else []
    if system != "weir":
        return found + [(name, "hook") for name in functions]
    return found + [(name, how) for name in functions for how in (*MODES, *(["built in"] if name in BUILT_IN else []))]


def vectors(plan: BenchPlan, count: int) -> torch.Tensor:
    """A vector [d] of length 1 for each request, in the model's dtype."""
    drawn = torch.randn(count, plan.width, generator=torch.Generator().manual_seed(7))
    return (drawn / drawn.norm(dim=1, keepdim=True)).to(getattr(torch, plan.dtype))


def weir_params(system: Any, size: BatchSize, name: str, how: str) -> list[Any]:
    import vllm_weir as weir

    layer, base = system.plan.steered_layer, system.base(size)
    found = []
    for w in vectors(system.plan, size.count):
        if how == "built in":
            found.append(weir.params(base, interventions=getattr(weir, BUILT_IN[name])(w, layer)))
        else:
            hook = weir.Hook(FUNCTIONS[name], layers=layer, args={"w": w}, mode=how)
            found.append(weir.params(base, hooks=hook))
    return found


def lens_params(system: Any, size: BatchSize, name: str, how: str) -> list[Any]:
    from vllm_lens import Hook

    def hook(w: torch.Tensor) -> Any:
        moved: list[torch.Tensor] = []

        def fn(ctx: Any, rows: Any) -> Any:
            if not moved:  # once for a request, as Weir does
                moved.append(w.to(rows.device))
            return FUNCTIONS[name](rows, SimpleNamespace(args={"w": moved[0]}))

        return Hook(fn=fn, layer_indices=[system.plan.steered_layer])

    # Its generate() empties extra_args: these serve one call.
    return [system.base(size, {"apply_hooks": [hook(w)]}) for w in vectors(system.plan, size.count)]


def with_nnsight(system: Any, llm: Any, prompts: list[list[int]], size: BatchSize, name: str) -> list[Any]:
    function, layer, count = FUNCTIONS[name], system.plan.steered_layer, size.generated
    with llm.trace(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False) as tracer:
        tokens = dict().save()  # type: ignore[attr-defined]  # noqa: C408 - nnsight adds `save` to objects
        for request, (prompt, w) in enumerate(zip(prompts, vectors(system.plan, size.count), strict=True)):
            with tracer.invoke(prompt):
                said, ctx = [], SimpleNamespace(args={"w": w.cuda()})
                for _ in tracer.iter[:count]:
                    output = llm.model.layers[layer].output
                    output[0][:] = function(output[0] + output[1], ctx) - output[1]  # the stream is the sum of both
                    said.append(llm.samples.clone())
                tokens[request] = said
    return [[int(one) for one in tokens[request]] for request in range(size.count)]


def serve(name: str, plan_path: str, scratch: str) -> None:
    """Start a system's engine, and answer commands, a line of JSON each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    plan = BenchPlan.model_validate_json(Path(plan_path).read_text())
    system = known_systems()[name](plan, Path(scratch))
    if missing := system.missing():
        answer(missing=missing)
        return
    llm = system.start(system.engine(EngineChoice(layers=(plan.steered_layer,))))
    if plan.dummy:
        system.fill(llm)
    answer(version=system.version())
    for line in sys.stdin:
        command = json.loads(line)
        size = BatchSize(kind="decode", count=command["count"], prompt=plan.prompt_tokens, generated=plan.tokens)
        prompts, function, how = plan.prompts(size), command["function"], command["how"]
        make = {"weir": weir_params, "vllm-lens": lens_params}.get(name)
        params = [system.base(size)] * size.count
        if function != NOTHING and make is not None:
            params = make(system, size, function, how)
        began = time.perf_counter()
        if name == "nnsight":
            tokens = with_nnsight(system, llm, prompts, size, function)
        else:
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            tokens = [list(out.outputs[0].token_ids) for out in outputs]
        answer(seconds=time.perf_counter() - began, tokens=tokens)


class Engine:
    """A system's process."""

    def __init__(self, name: str, plan: BenchPlan, folder: Path) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        (path := folder / "plan.json").write_text(plan.model_dump_json())
        environ = os.environ | {"HF_HUB_OFFLINE": "1"} | known_systems()[name].environ(plan)
        environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # `fill` sends a function to the engine's process
        # The engine's process imports the functions from here.
        environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import sys, hooks; hooks.serve(*sys.argv[1:])", name, str(path), str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("w"), text=True, env=environ,
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        said = [one.strip() for one in self.log.read_text().splitlines() if "Error" in one]
        return json.loads(line) if line else {"missing": f"it ended: {''.join(said[-1:])[-300:]}"}

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        return self.answer()


def measure(
    engines: list[Engine], batches: list[int], functions: list[str], repeats: int, missing: dict[str, str], limit: float
) -> list[dict[str, Any]]:
    """The seconds and tokens of every call, the systems taking turns; a round before that does not count.

    No round begins `limit` seconds after a batch size's first.
    """
    seconds, tokens = defaultdict(list), {}
    for count in batches:
        began = time.perf_counter()
        for turn in range(repeats + 1):
            if turn > 1 and time.perf_counter() - began > limit:
                break
            for engine in engines[:: 1 if turn % 2 else -1]:
                for function, how in ways(engine.name, functions):
                    if engine.name in missing:
                        break
                    found = engine.ask(count=count, function=function, how=how)
                    if "missing" in found:
                        missing[engine.name] = found["missing"]
                        break
                    key = count, function, engine.name, how
                    tokens[key] = found["tokens"]
                    if turn:
                        seconds[key].append(found["seconds"])
            print(f"{count} requests: round {turn} of {repeats}", file=sys.stderr, flush=True)
    results = []
    for (count, function, system, how), times in seconds.items():
        stock = seconds[count, NOTHING, "stock", ""]
        ratios = [one / plain for one, plain in zip(times, stock, strict=False)]
        ours = tokens.get((count, function, "weir", MODES[0]), tokens[count, NOTHING, "stock", ""])
        pairs = [a == b for x, y in zip(tokens[count, function, system, how], ours, strict=True) for a, b in zip(x, y)]
        results.append(
            {"requests": count, "function": function, "system": f"{system} {how}".strip(), "seconds": times}
            | {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
            | {"same": sum(pairs) / len(pairs)}
        )
    return sorted(results, key=lambda one: (one["requests"], [NOTHING, *functions].index(one["function"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--functions", default=",".join(FUNCTIONS))
    parser.add_argument("--batches", default="", help="requests at once, with commas; default: 1,64; on a CPU 1,4")
    parser.add_argument("--tokens", type=int, default=0, help="that each generates; default: 128; on a CPU 16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600, help="after which no round of a batch size begins")
    parser.add_argument("--model", default="", help="llama-8b, demo, or a folder; default: llama-8b; on a CPU demo")
    parser.add_argument("--memory", type=float, default=0.22, help="share of the GPU's memory for each system")
    parser.add_argument("--lens-path")
    parser.add_argument("--rivals-path")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    cuda, functions = torch.cuda.is_available(), given.functions.split(",")
    names = [name for name in SYSTEMS if name in ["stock", *given.systems.split(",")]]
    batches = [int(one) for one in (given.batches or ("1,64" if cuda else "1,4")).split(",")]
    with tempfile.TemporaryDirectory(prefix="weir-hooks-") as work:
        fields = model_fields(given.model or ("llama-8b" if cuda else "demo"), Path(work), cuda)
        plan = BenchPlan(
            **fields, cuda=cuda, eager=not cuda, systems=tuple(names), cases=("idle",), batches=tuple(batches),
            tokens=given.tokens or (128 if cuda else 16), prefill=None, repeats=given.repeats, warmups=1,
            case_seconds=600, memory_share=given.memory, lens_path=given.lens_path, rivals_path=given.rivals_path,
        )  # fmt: skip
        about: dict[str, Any] = {"model": plan.model_name, "tokens": plan.tokens, "versions": {}}
        about["device"] = torch.cuda.get_device_name() if cuda else "CPU"
        missing: dict[str, str] = {}
        engines: list[Engine] = []
        try:
            for name in names:  # one after the other: each measures the memory that is free
                engines.append(Engine(name, plan, Path(work)))
                found = engines[-1].answer()
                print(f"{name}: {found}", file=sys.stderr, flush=True)
                if "missing" not in found:
                    about["versions"][name] = found["version"]
                elif name == "stock":
                    sys.exit(f"stock vLLM did not start: {found['missing']}")
                else:
                    missing[name] = found["missing"]
            results = measure(engines, batches, functions, given.repeats, missing, given.seconds)
        finally:
            for engine in engines:
                engine.process.kill()
    print(f"{'requests':>8} {'function':9} {'system':18} {'ms a step':>9} {'of stock':>8} {'':15} {'same':>5}")
    for one in results:
        step = 1e3 * statistics.median(one["seconds"]) / plan.tokens
        spread = f"({one['least']:.3f}-{one['most']:.3f})"
        print(
            f"{one['requests']:8} {one['function']:9} {one['system']:18} {step:9.2f} {one['ratio']:8.3f} {spread:15} "
            f"{one['same']:5.0%}"
        )
    for name, why in missing.items():
        print(f"{name} is missing: {why}")
    if given.out:
        given.out.write_text(json.dumps(about | {"missing": missing, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
