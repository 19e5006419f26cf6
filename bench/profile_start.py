"""Where the time of an engine's start goes, without caches of compiled code: stock vLLM, Weir, and Weir with few taps.

PYTHONPATH=src:. python3 bench/profile_start.py --out bench/results/start_h200.json [--repeats 2] [--layers 32]

Every start is in a fresh process with empty caches; the engine runs in it, so that its parts can be timed.
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
from pathlib import Path
from typing import Any

from timed import timed

SYSTEMS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "weir": {},
    "weir, resid_post only": {"hooks": ["resid_post"]},
}
MARK = "PHASES "
TELLING = ("took", "takes", " time: ", "finished in")
"""What vLLM says about the time of a part."""


def start(config: dict[str, Any] | None, layers: int, width: int) -> dict[str, float]:
    """Seconds of one start's parts, in this process."""
    spent: dict[str, float] = {}

    def hold(owner: Any, name: str, part: str) -> None:
        def log(began: float, ended: float) -> None:
            spent[part] = spent.get(part, 0.0) + ended - began

        timed(owner, name, log)

    import torch
    from vllm import LLM

    from vllm_weir.bench.reference import make_model
    from vllm_weir.patches.model import discovery
    from vllm_weir.worker.runtime import WorkerRuntime

    cuda = torch.cuda.is_available()
    if cuda:
        from vllm.v1.worker.gpu_worker import Worker as worker
    else:
        from vllm.v1.worker.cpu_worker import CPUWorker as worker
    hold(worker, "init_device", "device")
    hold(worker, "load_model", "load the model, with Weir's proof")
    hold(worker, "determine_available_memory", "profile run, with torch.compile")
    hold(worker, "compile_or_warm_up_model", "warm-up, with CUDA graphs")
    if cuda:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        hold(GPUModelRunner, "capture_model", "of it: CUDA graphs")
    if config is not None:
        hold(discovery, "map_sites", "of it: proof")
        hold(WorkerRuntime, "__init__", "of it: taps and buffers")
    arguments: dict[str, Any] = {}
    if not cuda:
        arguments = {"kv_cache_memory_bytes": 1 << 28, "max_num_seqs": 16, "block_size": 32}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(make_model(Path(folder)))
        own = json.loads((path / "config.json").read_text())
        own |= {"num_hidden_layers": layers}
        if width:
            heads = {"hidden_size": width, "intermediate_size": 2 * width, "head_dim": 64, "vocab_size": 1024}
            own |= heads | {"num_attention_heads": width // 64, "num_key_value_heads": width // 64}
        (path / "config.json").write_text(json.dumps(own))
        llm = LLM(
            str(path), load_format="dummy", dtype="bfloat16", max_model_len=2048, max_num_batched_tokens=8192,
            skip_tokenizer_init=True, seed=0, enable_prefix_caching=False, gpu_memory_utilization=0.6,
            additional_config={"weir": config} if config else {}, **arguments,
        )  # fmt: skip
    spent["whole start"] = time.perf_counter() - began
    spent["of it: torch.compile"] = llm.collective_rpc(
        lambda worker: worker.vllm_config.compilation_config.compilation_time
    )[0]
    return spent


def apart(name: str, layers: int, width: int) -> dict[str, float]:
    """The same in a process of its own with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        caches = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        environment = os.environ | {cache: str(Path(folder) / cache.lower()) for cache in caches}
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "WEIR_DISABLE": "1" if SYSTEMS[name] is None else ""}
        command = [sys.executable, __file__, "--one", name, "--layers", str(layers), "--width", str(width)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        found = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
        if not found:
            raise SystemExit(f"{name} did not start:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        said = [line for line in (done.stdout + done.stderr).splitlines() if any(word in line for word in TELLING)]
        print("\n".join(f"  {line[:200]}" for line in said), flush=True)
        return json.loads(found[0].removeprefix(MARK))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=";".join(SYSTEMS), help="with semicolons")
    parser.add_argument("--repeats", type=int, default=2, help="fresh processes each, taking turns")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=0, help="of a small model, where the 8B shapes are too much")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(MARK + json.dumps(start(SYSTEMS[given.one], given.layers, given.width)), flush=True)
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in given.systems.split(";")}
    for _ in range(given.repeats):
        for name, starts in found.items():
            starts.append(apart(name, given.layers, given.width))
            print(f"{name}: {starts[-1]['whole start']:.1f} s", flush=True)
            if given.out:
                given.out.write_text(json.dumps(report(found), indent=1) + "\n")
    table(found)


def report(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """What is kept of the run."""
    import torch
    import vllm

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    rounded = {name: [{k: round(v, 3) for k, v in start.items()} for start in starts] for name, starts in found.items()}
    return {"device": device, "vllm": vllm.__version__, "torch": torch.__version__, "seconds": rounded}


def table(found: dict[str, list[dict[str, float]]]) -> None:
    """Print medians."""
    parts = list(dict.fromkeys(part for starts in found.values() for start in starts for part in start))
    print(f"{'median seconds':36}" + "".join(f"{name:>24}" for name in found))
    for part in parts:
        cells = [[start[part] for start in starts if part in start] for starts in found.values()]
        print(f"{part:36}" + "".join(f"{statistics.median(c) if c else float('nan'):24.2f}" for c in cells))


if __name__ == "__main__":
    main()
