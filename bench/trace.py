"""What the taps add to Dynamo's tracing of a model: CPU seconds of 32 narrow blocks, on stock vLLM and with Weir.

    PYTHONPATH=src:. python3 bench/trace.py [--repeats 5] [--layers 32] [--out bench/results/trace_cpu.json]

Each trace is in a fresh process, which ends where the compiler would be given the graph. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SYSTEMS = ("stock", "weir")
MARK, WIDTH = "TRACED ", 128


def trace(layers: int) -> None:
    """Trace one model in this process, say what it took, and end the process."""
    import torch._dynamo.convert_frame as frames
    import torch._inductor.compile_fx as inductor
    from vllm import LLM

    from vllm_weir.bench.reference import LLAMA_8B, make_model

    began: list[float] = []
    compile_frame = frames._compile

    def begin(*args: Any, **kwargs: Any) -> Any:
        began.append(time.thread_time())
        return compile_frame(*args, **kwargs)

    def end(graph: Any, *_args: Any, **_kwargs: Any) -> None:
        taps = sum("weir" in str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        found = {"seconds": time.thread_time() - began[0], "nodes": len(graph.graph.nodes), "taps": taps}
        print(MARK + json.dumps(found), flush=True)
        os._exit(0)

    frames._compile, inductor.compile_fx = begin, end
    narrow = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "head_dim": 64, "vocab_size": 1024}
    heads = {"num_hidden_layers": layers, "num_attention_heads": WIDTH // 64, "num_key_value_heads": WIDTH // 64}
    with tempfile.TemporaryDirectory() as folder:
        LLM(
            make_model(Path(folder), LLAMA_8B | narrow | heads), load_format="dummy", dtype="bfloat16",
            max_model_len=2048, max_num_seqs=16, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 28, block_size=32,
        )  # fmt: skip
    raise SystemExit("the model was not compiled")


def apart(system: str, layers: int) -> dict[str, float]:
    """The same in a process of its own."""
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DISABLE_COMPILE_CACHE": "1"}
    environment |= {"WEIR_DISABLE": "1" if system == "stock" else ""}
    command = [sys.executable, __file__, "--one", "--layers", str(layers)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not found:
        raise SystemExit(f"{system} was not traced:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return json.loads(found[0].removeprefix(MARK))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="fresh processes each, taking turns")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        trace(given.layers)
    found: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}
    for _ in range(given.repeats):
        for system, traces in found.items():
            traces.append(apart(system, given.layers))
            print(f"{system}: {traces[-1]['seconds']:.2f} s, {traces[-1]['taps']} taps", flush=True)
    import torch
    import vllm

    medians = {system: statistics.median(t["seconds"] for t in traces) for system, traces in found.items()}
    versions = {"device": platform.machine(), "vllm": vllm.__version__, "torch": torch.__version__}
    print(", ".join(f"{system} {median:.2f} s" for system, median in medians.items()))
    if given.out:
        report = versions | {"layers": given.layers, "median_s": medians, "traces": found}
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
