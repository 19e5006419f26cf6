"""Device time of rp8 alone, and what it adds to a model's step beside it on a side stream, or after it.

PYTHONPATH=src python3 bench/packing.py [--batches 1,32,256] [--shapes all] [--out FILE]

The step is a CUDA graph of the matrix products of Llama-3.1-8B's blocks and head, which need all of the device. The
records are those of one token of each request at all blocks. Times are microseconds, medians of 5, with the smallest
and largest; what is added is taken from steps with and without records, turn by turn.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from vllm_weir.schema.compression import Compression
from vllm_weir.worker.transfer import codec_kernels
from vllm_weir.worker.transfer.codecs import Codecs

LAYERS, WIDTH, HIDDEN, VOCABULARY, STEPS, REPEATS = 32, 4096, 14336, 128256, 15, 5
SHAPES = ((16, 3, 4), (16, 4, 4), (32, 3, 4), (32, 4, 4), (64, 3, 4), (64, 4, 4), (128, 3, 8))
"""Of the kernel's programs, to be tried, see `codec_triton.project`."""
PRODUCTS = ((WIDTH, WIDTH + 2048), (WIDTH, WIDTH), (WIDTH, 2 * HIDDEN), (HIDDEN, WIDTH))


def model(batch: int) -> torch.cuda.CUDAGraph:
    """One step's products; they are computed when it is replayed."""
    x = {n: torch.randn(batch, n, device="cuda").bfloat16() for n in (WIDTH, HIDDEN)}
    sizes = [*PRODUCTS * LAYERS, (WIDTH, VOCABULARY)]
    weights = [torch.randn(n, m, device="cuda").bfloat16() for n, m in sizes]

    def step() -> list[torch.Tensor]:
        return [x[len(w)] @ w for w in weights]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.keep = (x, weights)
    return graph


def timed(work: Callable[[], object]) -> float:
    """Microseconds of one of STEPS."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(STEPS):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / STEPS


def beside(graph: torch.cuda.CUDAGraph, encode: Callable[[], object], side: torch.cuda.Stream) -> Callable[[], None]:
    """A step, with the records of the one before it."""

    def step() -> None:
        written = torch.cuda.Event()
        written.record()
        side.wait_event(written)
        with torch.cuda.stream(side):
            encode()
        graph.replay()

    return step


def after(graph: torch.cuda.CUDAGraph, encode: Callable[[], object]) -> Callable[[], None]:
    """A step, and then its records."""

    def step() -> None:
        graph.replay()
        encode()

    return step


def figures(times: list[float]) -> dict[str, float]:
    """As they are written down."""
    return {
        "median_us": round(statistics.median(times), 1),
        "min": round(min(times), 1),
        "max": round(max(times), 1),
        "repeats": len(times),
    }


def ways(rows: torch.Tensor, every: bool) -> dict[str, Callable[[], object]]:
    """What is measured: a product by the library and a packing kernel, and one kernel for both."""
    codecs = Codecs(WIDTH, rows.device, rows.dtype)
    codec = codecs[codecs.hold("a", Compression.parse({"method": "rp8", "k": 64}, "compress"))]
    halves = codec.halves
    assert halves is not None
    out: dict[str, Callable[[], object]] = {
        "product and packing": lambda: codec_kernels.pack(codec._project(rows), 64),
        "as it is": lambda: codec.encode(rows),
    }
    if every:
        for spread, shape in itertools.product((True, False), SHAPES):
            name = ("chunks spread" if spread else "one launch") + ", rows {}, stages {}, warps {}".format(*shape)
            out[name] = functools.partial(codec_kernels.project, rows, halves, spread, shape)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--shapes", choices=("all", "none"), default="none", help="which programs to try, too")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = []
    side = torch.cuda.Stream()
    for batch in map(int, given.batches.split(",")):
        rows = torch.randn(batch * LAYERS, WIDTH, device="cuda").bfloat16()
        graph = model(batch)
        for name, encode in ways(rows, given.shapes == "all").items():
            try:
                encode()
            except triton.runtime.errors.OutOfResources:
                continue
            alone = torch.cuda.CUDAGraph()
            with torch.cuda.graph(alone):
                encode()
            steps = {"beside": beside(graph, encode, side), "after": after(graph, encode)}
            own, times = [], {place: [] for place in steps}
            for _ in range(REPEATS + 1):
                without = timed(graph.replay)
                for place, step in steps.items():
                    times[place].append(timed(step) - without)
                own.append(timed(alone.replay))
            entry = {"way": name, "batch": batch, "alone": figures(own[1:])}
            entry |= {place: figures(took[1:]) for place, took in times.items()}
            found.append(entry | {"step_us": round(without, 1)})
            line = "".join(f"  {place} {entry[place]['median_us']:6.1f}" for place in steps)
            print(f"{batch:4} {name:40} alone {entry['alone']['median_us']:6.1f}{line} of {without:.0f}", flush=True)
        del graph
        torch.cuda.empty_cache()
    if given.out:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "width": WIDTH, "k": 64}
        given.out.write_text(json.dumps(about | {"cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
