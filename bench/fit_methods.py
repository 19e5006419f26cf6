"""How long the arithmetic of `weir.fit` takes for a block, apart from any engine: rows of random numbers.

    python bench/fit_methods.py [--pairs 1000] [--width 4096] [--blocks 2] [--device cpu] [--out FILE]

Rows of pairs have common content, and a difference along one axis which is smaller than the noise: flat spectra, the
slowest case for Lanczos's method. With `--decay P` the k-th axis has a spread of k^-P, which the regressions find
harder. The first block is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path

import torch

from vllm_weir.fitting.layer import FitTask, fit_layer
from vllm_weir.fitting.methods import METHODS, MethodOptions

LAYERS = 32
"""Blocks of Llama-3.1-8B."""


def block(seed: int, pairs: int, width: int, decay: float, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of two classes, float64 [pairs, width]."""
    generator = torch.Generator().manual_seed(seed)
    axis = torch.randn(width, generator=generator) / width**0.5
    spread = torch.arange(1, width + 1) ** -decay * (width**0.5 if decay else 1.0)
    content, *noise = (torch.randn(pairs, width, generator=generator) * spread for _ in range(3))
    sides = content + 0.3 * noise[0] + axis, content + 0.3 * noise[1] - axis
    return sides[0].bfloat16().to(device).double(), sides[1].bfloat16().to(device).double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--decay", type=float, default=0.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    seconds = {}
    for name in args.methods:
        method, task = METHODS[name], FitTask(name, args.pairs, args.pairs)
        times = []
        for seed in range(1 + args.blocks):
            rows = block(seed, args.pairs, args.width, args.decay, args.device)
            begin = time.perf_counter()
            fit_layer(*rows, method, task.parts, MethodOptions())  # it returns numbers, so the device is done
            times.append(time.perf_counter() - begin)
        seconds[name] = sum(times[1:]) / args.blocks
        print(f"{name}: {seconds[name]:.2f} s a block, {LAYERS * seconds[name]:.0f} s for {LAYERS} blocks", flush=True)
    result = {
        "what": "seconds a block, of all folds and their AUC",
        "pairs": args.pairs, "width": args.width, "decay": args.decay, "folds": FitTask("diff", 1, 1).folds,
        "seconds": seconds, "device": args.device, "threads": torch.get_num_threads(), "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
