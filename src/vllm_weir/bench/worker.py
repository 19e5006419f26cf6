"""One system's process: starts its engine and runs what it is told, line by line.

``python -m vllm_weir.bench.worker PLAN.json SYSTEM SCRATCH``; commands come on stdin and answers go to the first
stdout, each one line of JSON. Whatever else is printed goes to stderr.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from vllm_weir.bench.plan import CAPTURES, BatchSize, BenchPlan

KEPT_ROWS = 8


class ServedEngine:
    """An engine, and what it is told to do."""

    def __init__(self, plan: BenchPlan, system: Any) -> None:
        self.plan = plan
        self.system = system
        self.llm: Any = None
        self._graphs = 0

    def hello(self) -> dict[str, Any]:
        """Whether the system can run here, and its version."""
        missing = self.system.missing()
        return {"missing": missing, "version": None if missing else self.system.version()}

    def start(self) -> dict[str, Any]:
        """Seconds from constructing the engine until it is ready, with vLLM imported before."""
        from vllm import LLM

        arguments = self.system.engine()
        before = time.perf_counter()
        self.llm = LLM(**arguments)
        seconds = time.perf_counter() - before
        return {"seconds": seconds, "arguments": arguments, "about": _about(self.plan)}

    def fill(self) -> dict[str, Any]:
        """Give a dummy model weights that make every block matter."""
        from vllm_weir.bench.weights import fill_engine

        return {"filled": self.llm.apply_model(fill_engine) if self.plan.dummy else None}

    def run(self, case: str, size: dict[str, Any], keep: str | None) -> dict[str, Any]:
        """One call of generate, timed until every output and every row asked for is here as a tensor.

        The answer also says how many CUDA graphs were captured meanwhile.

        `keep` names a file for a few of the delivered rows.
        """
        of = BatchSize.model_validate(size)
        prompts = [{"prompt_token_ids": ids} for ids in self.plan.prompts(of)]
        params = self.system.params(case, of)
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        delivered = self.system.deliver(case, outputs)
        seconds = time.perf_counter() - began
        self._look(case, of, outputs, delivered)
        if keep and delivered:
            self._keep(case, of, outputs, delivered, keep)
        self.system.clean(outputs)
        del outputs, delivered
        gc.collect()
        before, self._graphs = self._graphs, self.system.late_graphs(self.llm)
        return {"seconds": seconds, "graphs": self._graphs - before}

    def _look(self, case: str, size: BatchSize, outputs: list[Any], delivered: list[Any]) -> None:
        """Every output is whole, and so are its rows."""
        for out in outputs:
            if len(out.outputs[0].token_ids) != size.generated:
                raise ValueError(f"{len(out.outputs[0].token_ids)} tokens, not {size.generated}")
        if case not in CAPTURES:
            return
        if len(delivered) != size.count:
            raise ValueError(f"rows of {len(delivered)} requests, not of {size.count}")
        want = (self.plan.layers, size.rows(case), self.plan.width)
        for rows in delivered:
            shape = self.system.shape(case, rows, size)
            if shape != want:
                raise ValueError(f"rows of shape {shape}, not {want}")

    def _keep(self, case: str, size: BatchSize, outputs: list[Any], delivered: list[Any], path: str) -> None:
        """A few rows of every block, of the first, the middle and the last request."""
        import torch
        from safetensors.torch import save_file

        kept: dict[str, torch.Tensor] = {}
        first = size.prompt - 1 if case == "capture_last_all_layers" else 0
        for i in {0, size.count // 2, size.count - 1}:
            stack = self.system.stacked(case, delivered[i], size)
            at = torch.linspace(0, stack.shape[1] - 1, min(KEPT_ROWS, stack.shape[1])).long()
            name = f"{case}|{size.label}|{i}"
            ids = list(outputs[i].prompt_token_ids) + list(outputs[i].outputs[0].token_ids)
            kept |= {f"{name}|rows": stack[:, at].contiguous(), f"{name}|at": at + first}
            kept[f"{name}|ids"] = torch.tensor(ids[:-1])
        save_file(kept, path)

    def steer_check(self, case: str) -> dict[str, Any]:
        """How far rows after a steering are from the rows before it plus the vector, relative to the largest row."""
        import torch

        size = BatchSize(kind="decode", count=8, prompt=self.plan.prompt_tokens, generated=4)
        prompts = [{"prompt_token_ids": ids} for ids in self.plan.prompts(size)]
        vectors = self.system.vectors(size.count)
        layers, before, after = self.system.steered_pair(self.llm, prompts, vectors, case, size)
        want = before.float() + vectors[:, None, None, :]
        gap = (after.float() - want).abs().amax(-1) / want.abs().amax(-1)
        moved = (after.float() - before.float()).flatten(1, 2).mean(1)
        alike = torch.cosine_similarity(moved, vectors, dim=-1).min()
        return {"worst": float(gap.max()), "cosine": float(alike), "rows": gap.numel(), "layers": len(layers)} | {
            "one_pass": self.system.one_pass
        }


def _about(plan: BenchPlan) -> dict[str, str]:
    """Versions, and the device's name."""
    import platform

    import torch
    import vllm
    from vllm.platforms import current_platform

    if plan.cuda:
        device = current_platform.get_device_name()
    else:
        lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        device = f"CPU, {os.cpu_count()} cores, {names[0] if names else platform.machine()}"
    return {"device": device, "vllm": vllm.__version__, "torch": torch.__version__, "python": platform.python_version()}


def serve(plan: BenchPlan, system: Any, answers: Any) -> None:
    """Answer commands until there are no more."""
    served = ServedEngine(plan, system)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            reply = getattr(served, command.pop("do"))(**command)
        except Exception as e:  # noqa: BLE001 - the parent decides what a failed case means
            traceback.print_exc()
            reply = {"error": f"{type(e).__name__}: {str(e).strip()[:600]}"}
        print(json.dumps(reply), file=answers, flush=True)


def main() -> None:
    """Keep stdout for the answers: vLLM and its processes print to it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    plan = BenchPlan.model_validate_json(Path(sys.argv[1]).read_text())
    from vllm_weir.bench.systems import BY_NAME

    with contextlib.suppress(KeyboardInterrupt):
        serve(plan, BY_NAME[sys.argv[2]](plan, Path(sys.argv[3])), answers)


if __name__ == "__main__":
    main()
