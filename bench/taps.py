"""Device time of the tap's kernel alone: CUDA graphs of 32 launches, one for each block of Llama-3.1-8B's shapes.

PYTHONPATH=src python3 bench/taps.py [--against OTHER_TAP_TRITON.PY ...] [--out FILE]

Every case is replayed many times; times are microseconds a launch, medians of 5, with the smallest and largest.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from vllm_weir.schema.instructions import AFFINE, CONST
from vllm_weir.schema.taps import STAGES
from vllm_weir.worker.steering.programs import LAST
from vllm_weir.worker.tap import triton_kernel
from vllm_weir.worker.tap.op import numbered

LAYERS, WIDTH, REPLAYS, REPEATS = 32, 4096, 200, 5
CASES = ("silent", "elsewhere", "capture", "steer", "ablate")
"""No token wants anything; all do, at other taps only; each token's row is recorded; each has a vector added, or one
direction ablated, which is another one for each token."""
WEIGHTS = (8192, WIDTH)
"""A matrix that is read ahead of each launch: 64 MB, which is more than stays in an H100's L2 cache."""


def tensors(case: str, tokens: int) -> dict[str, torch.Tensor]:
    """What a launch is given."""
    ranks = torch.full((4, LAYERS * STAGES), -1, dtype=torch.int32)
    plan = torch.tensor([[-1, -1, -1, 0]] * tokens, dtype=torch.int32)
    heads = torch.full((tokens, LAYERS), -1, dtype=torch.int32)
    if case == "capture":
        ranks[0, STAGES - 1 :: STAGES] = torch.arange(LAYERS, dtype=torch.int32)
    if case in ("capture", "elsewhere"):
        plan[:, 0], plan[:, 1] = torch.arange(tokens) * LAYERS, 0
    if case in ("steer", "ablate"):
        plan[:, 2] = torch.arange(tokens)
        heads[:] = torch.arange(tokens)[:, None]
    kind, factor = (AFFINE, -1.0) if case == "ablate" else (CONST, 0.5)
    w = torch.arange(tokens) if case == "ablate" else torch.full((tokens,), -1)
    ints = torch.tensor([[kind, i, int(w[i]), -1, LAST, 0, WIDTH, 0] for i in range(tokens)], dtype=torch.int32)
    floats = torch.tensor([[factor, 0.0, 0.0, 0.0]] * tokens)
    on_host = {"plan": plan, "ranks": ranks, "heads": heads, "ints": ints, "floats": floats}
    ring = torch.zeros(tokens * LAYERS if case == "capture" else 1, WIDTH, dtype=torch.bfloat16)
    on_host |= {
        "ring": ring,
        "vectors": torch.nn.functional.normalize(torch.randn(tokens, WIDTH)),
        "cells": torch.zeros(tokens, 1),
    }
    return {name: tensor.cuda() for name, tensor in on_host.items()}


def measure(launch, case: str, tokens: int, behind: str) -> list[float]:
    """Microseconds a launch, REPEATS times; `behind`: each behind another kernel, whose time is taken off."""
    cold = behind == "weights"
    weights = torch.zeros(LAYERS, *WEIGHTS, device="cuda", dtype=torch.bfloat16) if cold else None
    given = tensors(case, tokens)
    order = [given[name] for name in ("plan", "ranks", "ring", "heads", "ints", "floats", "vectors", "cells")]
    hidden, residual = torch.randn(2, LAYERS, tokens, WIDTH, device="cuda").bfloat16()
    numbers = [numbered(i, device=hidden.device) for i in range(LAYERS)]

    def step(taps: bool) -> None:
        for i in range(LAYERS):
            if weights is not None:
                torch.mv(weights[i], hidden[i, 0])
            elif behind:
                hidden[i].mul_(1.0)
            if taps:
                launch(hidden[i], residual[i], numbers[i], *order)

    with_taps = replayed(lambda: step(True))
    without = replayed(lambda: step(False)) if behind else [0.0] * REPEATS
    return [a - b for a, b in zip(with_taps, without, strict=True)]


def replayed(step: Callable[[], None]) -> list[float]:
    """Microseconds of a 32nd of what is launched, from a CUDA graph, REPEATS times."""
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    out = []
    for _ in range(REPEATS + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        out.append(begin.elapsed_time(end) * 1000 / REPLAYS / LAYERS)
    return out[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--against", type=Path, nargs="*", default=[], help="other versions of worker/tap/triton_kernel.py"
    )
    parser.add_argument("--tokens", default="1,32,256,1024")
    parser.add_argument(
        "--behind", choices=("", "rows", "weights"), default="",
        help="each launch behind another kernel, as in a model: one that writes rows, or reads 64 MB as layers do",
    )  # fmt: skip
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    launches = {"this": triton_kernel.launch}
    for path in given.against:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        launches[path.stem] = module.launch
    found = []
    for tokens in map(int, given.tokens.split(",")):
        for case in given.cases.split(","):
            for name, launch in launches.items():
                times = measure(launch, case, tokens, given.behind)
                found.append(
                    {"version": name, "case": case, "tokens": tokens, "median_us": round(statistics.median(times), 3)}
                    | {"min": round(min(times), 3), "max": round(max(times), 3), "repeats": len(times)}
                )
            row = [f"{f['version']} {f['median_us']:7.2f}" for f in found[-len(launches) :]]
            print(f"{tokens:5} tokens  {case:10}", "  ".join(row), flush=True)
    if given.out:
        device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "width": WIDTH}
        about = device | {"launches_a_graph": LAYERS, "behind": given.behind}
        given.out.write_text(json.dumps(about | {"cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
