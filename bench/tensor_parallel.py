"""What Weir costs with tensor parallelism, where vLLM fuses all-reduce and norm into one kernel of FlashInfer.

PYTHONPATH=src python3 bench/tensor_parallel.py --out bench/results/tensor_parallel_h100.json

Each system is a process with an engine of its own (Llama-3.1-8B shapes, dummy weights, two GPUs); they stand beside
each other and take turns. `--beside NAME=SRC` adds Weir from another source tree. Every system also reports what the
pass found in the graph: all-reduces that are fused with a norm, and those that are not. Weir's systems capture all
blocks once, and the rows of two trees are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
CASES = {
    "decode, batch 1": (1, 32, 96),
    "decode, batch 32": (32, 32, 64),
    "decode, batch 256": (256, 32, 32),
    "prefill": (32, 1024, 1),
}
"""Case -> prompts, tokens of each, tokens generated."""
LIVE = "decode, batch 32"


def fusions(log: Path) -> dict[str, int]:
    """Return how often vLLM's pass ran in a system's processes, and how many all-reduces it fused in all."""
    counts = [int(n) for n in re.findall(r"allreduce_rms_fusion.py:\d+\] Replaced (\d+) patterns", log.read_text())]
    return {"graphs": len(counts), "fused": sum(counts)}


def serve(name: str, model: str, tensor_parallel: int, memory: float) -> None:
    """One engine: a case a line on standard input, a line of JSON for each on standard output."""
    os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "fork"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model, load_format="dummy", skip_tokenizer_init=True, tensor_parallel_size=tensor_parallel,
        gpu_memory_utilization=memory, kv_cache_memory_bytes=4 << 30, max_model_len=4096, max_num_seqs=256,
        enable_prefix_caching=False, seed=0,
    )  # fmt: skip
    print(json.dumps({"ready": name}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        prompts, length, new = CASES[command["case"]]
        params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
        texts = [{"prompt_token_ids": [(7 * i + j) % 1000 + 10 for j in range(length)]} for i in range(prompts)]
        if command.get("rows"):
            import torch

            import vllm_weir as weir

            out = llm.generate(texts[:4], weir.params(params, capture=weir.Capture("resid_post")), use_tqdm=False)
            rows = {str(site): torch.stack([o.activations[site] for o in out]) for site in out[0].activations.sites}
            torch.save({"rows": rows, "tokens": [list(o.outputs[0].token_ids) for o in out]}, command["rows"])
            print(json.dumps({}), file=answers, flush=True)
            continue
        if command.get("steer"):
            import torch

            import vllm_weir as weir

            params = weir.params(params, interventions=[weir.Add(torch.ones(4096) * 0.01, layers=16)])
        begin = time.perf_counter()
        out = llm.generate(texts, params, use_tqdm=False)
        took = time.perf_counter() - begin
        first = [list(o.outputs[0].token_ids)[:8] for o in out[:4]]
        print(json.dumps({"seconds": took, "tokens": first}), file=answers, flush=True)


class Engine:
    """A system's process."""

    def __init__(self, name: str, source: str | None, given: argparse.Namespace, folder: Path) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        environ = dict(os.environ) | {"WEIR_DISABLE": "" if name != "stock" else "1"}
        environ["VLLM_LOGGING_LEVEL"] = "DEBUG"  # see `fusions`
        if source:
            environ["PYTHONPATH"] = f"{source}:{environ.get('PYTHONPATH', '')}"
        command = [sys.executable, __file__, "--engine", name, "--model", given.model]
        command += ["--tensor-parallel", str(given.tensor_parallel), "--memory", str(given.memory)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("w"), text=True, env=environ
        )

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended: {self.log.read_text()[-4000:]}")
        return json.loads(line)

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.answer()


def measure(engines: list[Engine], repeats: int) -> dict[str, Any]:
    """Seconds of every case for every system, taking turns; one round before that does not count."""
    plain = [(case, engine, {}) for case in CASES for engine in engines]
    live = [(LIVE, engine, {"steer": True}) for engine in engines if engine.name != "stock"]
    seconds: dict[str, dict[str, list[float]]] = {}
    tokens: dict[str, dict[str, Any]] = {}
    for turn in range(repeats + 1):
        for case, engine, options in (plain + live)[:: 1 if turn % 2 else -1]:
            found = engine.ask(case=case, **options)
            name = f"{engine.name}{', steer one block' if options else ''}"
            tokens.setdefault(case, {})[name] = found["tokens"]
            if turn:
                seconds.setdefault(case, {}).setdefault(name, []).append(found["seconds"])
        print(f"round {turn} of {repeats}", file=sys.stderr, flush=True)
    same = {case: by["weir"] == by["stock"] for case, by in tokens.items()}
    return {"seconds": seconds, "same_tokens_as_stock": same}


def compare(engines: list[Engine], folder: Path) -> dict[str, float]:
    """Cosines of rows of all blocks between Weir's systems: the least of any row, and of the last block's."""
    import torch

    found = {}
    for engine in (e for e in engines if e.name != "stock"):
        path = folder / f"{engine.name}.pt"
        engine.ask(case=LIVE, rows=str(path))
        found[engine.name] = torch.load(path, weights_only=False)
    out = {}
    ours = found["weir"]
    for name, other in found.items():
        if name != "weir":
            prompt = CASES[LIVE][1]
            cosines = [
                torch.nn.functional.cosine_similarity(
                    ours["rows"][site][:, :prompt].float(), other["rows"][site][:, :prompt].float(), dim=-1
                ).min()
                for site in ours["rows"]
            ]
            out[f"1 - cosine of prompt rows, weir and {name}, worst"] = 1 - float(min(cosines))
    finite = all(bool(rows.isfinite().all()) for rows in ours["rows"].values())
    return out | {"finite": finite}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--beside", action="append", default=[], help="NAME=SRC: Weir from another source tree")
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--memory", type=float, default=0.25, help="share of a GPU's memory for each system")
    parser.add_argument("--model", default="", help="a folder with a config.json; default: Llama-3.1-8B's shapes")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        serve(given.engine, given.model, given.tensor_parallel, given.memory)
        return
    folder = Path(tempfile.mkdtemp(prefix="weir-tp-"))
    if not given.model:
        given.model = str(folder / "model")
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(LLAMA_8B))
    systems: list[tuple[str, str | None]] = [("stock", None), ("weir", None)]
    systems += [(name, source) for name, _, source in (text.partition("=") for text in given.beside)]
    engines: list[Engine] = []
    begin = time.perf_counter()
    try:
        engines += [Engine(name, source, given, folder) for name, source in systems]
        for engine in engines:
            print(f"{time.perf_counter() - begin:.0f} s: {engine.answer()}", file=sys.stderr, flush=True)
        result = measure(engines, given.repeats) | {"rows": compare(engines, folder)}
    finally:
        for engine in engines:
            engine.process.kill()
    result["fusions"] = {engine.name: fusions(engine.log) for engine in engines}
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=1))
    for name, counts in result["fusions"].items():
        print(f"{name:10s} all ranks: {counts['graphs']} graphs, {counts['fused']} all-reduces fused with a norm")
    print(result["rows"], "same tokens as stock:", result["same_tokens_as_stock"])
    for case, by in result["seconds"].items():
        for name, values in by.items():
            ratios = [value / stock for value, stock in zip(values, by["stock"], strict=True)]
            print(
                f"{case:18s} {name:24s} {statistics.median(values) * 1e3:9.1f} ms  ratio of medians "
                f"{statistics.median(values) / statistics.median(by['stock']):.4f}  paired "
                f"{statistics.median(ratios):.4f} ({min(ratios):.3f}-{max(ratios):.3f})"
            )


if __name__ == "__main__":
    main()
