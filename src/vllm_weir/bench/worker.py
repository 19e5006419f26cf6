"""One system's process: it starts an engine and does what it is told, line by line.

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

from vllm_weir.bench.cases import CAPTURES, CHAT_ROLES
from vllm_weir.bench.plan import BatchSize, BenchPlan, EngineChoice

SAMPLED_ROWS = 8
"""Rows of a request that are compared with transformers."""
SAMPLED_REQUESTS = 3


class ServedEngine:
    """An engine, and what the measuring process can tell it; every public method is a command."""

    def __init__(self, plan: BenchPlan, system: Any) -> None:
        self.plan = plan
        self.system = system
        self.llm: Any = None
        self._graphs = 0
        self._calls = 0

    def hello(self) -> dict[str, Any]:
        missing = self.system.missing()
        return {"missing": missing, "version": None if missing else self.system.version()}

    def start(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Start the engine; `seconds` is the time until it is ready, with vLLM imported before."""
        import vllm  # noqa: F401

        arguments = self.system.engine(EngineChoice.model_validate(choice))
        before = time.perf_counter()
        self.llm = self.system.start(arguments)
        seconds = time.perf_counter() - before
        return {"seconds": seconds, "arguments": arguments, "about": _about(self.plan)}

    def fill(self) -> dict[str, Any]:
        """Give a dummy model weights that make every block matter; `filled` is how many, on each rank."""
        return {"filled": self.system.fill(self.llm) if self.plan.dummy else None}

    def run(self, case: str, size: dict[str, Any], keep: str | None) -> dict[str, Any]:
        """Generate once, and return the seconds until every output and every row asked for is here as a tensor.

        The answer also says how many CUDA graphs were captured meanwhile.

        `case`: what every request asks for; `size`: fields of a `BatchSize`; `keep`: a file for a few of the delivered
        rows, or None.
        """
        batch = BatchSize.model_validate(size)
        self._calls += 1
        call = f" {case} {self._calls}" if batch.is_workload else ""
        prompts = [{"prompt_token_ids": ids} for ids in self.plan.prompts(batch, call)]
        params = self.system.params(case, batch)
        began = time.perf_counter()
        outputs = self.system.generate(self.llm, prompts, params)
        delivered = self.system.deliver(case, outputs)
        seconds = time.perf_counter() - began
        self._check_complete(case, batch, outputs, delivered)
        if keep and delivered:
            self._keep(case, batch, outputs, delivered, keep)
        self.system.clean(outputs)
        del outputs, delivered
        gc.collect()
        before, self._graphs = self._graphs, self.system.late_graphs(self.llm)
        return {"seconds": seconds, "graphs": self._graphs - before}

    def _check_complete(self, case: str, size: BatchSize, outputs: Any, delivered: list[Any]) -> None:
        """Raise ValueError unless every output is whole, and so are its rows."""
        from vllm_weir.bench.systems.stock import shape

        for out in outputs:
            if len(out.outputs[0].token_ids) != size.generated:
                raise ValueError(f"an output has {len(out.outputs[0].token_ids)} tokens, not {size.generated}")
        self.system.verify(case, outputs)
        if case not in CAPTURES:
            return
        if len(delivered) != size.count:
            raise ValueError(f"rows of {len(delivered)} requests were delivered, not of {size.count}")
        for request, (out, rows) in enumerate(zip(outputs, delivered, strict=True)):
            wanted = self.plan.wanted(case, size, request, len(out.prompt_token_ids))
            found = None if rows is None else shape(rows)
            if found != wanted:
                raise ValueError(f"the rows of request {request} have shape {found}, not {wanted}")

    def _keep(self, case: str, size: BatchSize, outputs: Any, delivered: list[Any], path: str) -> None:
        """Write a few rows of every block, of the first, the middle and the last request that captures.

        Each request has tensors ``CASE|SIZE|REQUEST|...``: ``rows`` [blocks, n, d], ``layers`` [blocks], ``ids`` (the
        tokens that entered the model) and ``at`` [n], the rows' positions. A mean over the prompt is one row, and its
        ``at`` has every position that it is over.
        """
        import torch
        from safetensors.torch import save_file

        from vllm_weir.bench.systems.stock import stacked

        kept: dict[str, torch.Tensor] = {}
        for request in _sampled_requests(case, size.count):
            rows = stacked(delivered[request])
            prompt = list(outputs[request].prompt_token_ids)
            chosen = torch.linspace(0, rows.shape[1] - 1, min(SAMPLED_ROWS, rows.shape[1])).long()
            at = torch.arange(len(prompt)) if case == "mean" else chosen + first_position(case, len(prompt))
            name = f"{case}|{size.label}|{request}"
            kept[f"{name}|rows"] = rows[:, chosen].contiguous()
            kept[f"{name}|at"] = at
            kept[f"{name}|layers"] = torch.tensor(self.plan.captured_layers(case))
            kept[f"{name}|ids"] = torch.tensor((prompt + list(outputs[request].outputs[0].token_ids))[:-1])
        save_file(kept, path)

    def steer_check(self, case: str) -> dict[str, Any]:
        """Return how far rows after an intervention are from what it should make of the rows before it.

        `worst` is relative to the row's largest value; `cosine` is that of the mean changes, done and intended.
        """
        import torch

        size = BatchSize(kind="decode", count=8, prompt=self.plan.prompt_tokens, generated=4)
        prompts = [{"prompt_token_ids": ids} for ids in self.plan.prompts(size)]
        vectors = self.system.vectors(size.count)
        layers, before, after = self.system.steered_pair(self.llm, prompts, vectors, case, size)
        before, after = before.float(), after.float()
        intended = self.system.intended(case, before, vectors)
        gap = (after - intended).abs().amax(-1) / intended.abs().amax(-1)
        done, meant = ((rows - before).flatten(1, 2) for rows in (after, intended))
        if case == "ablate_everywhere":  # what is taken away has either sign: single rows
            alike = torch.cosine_similarity(done.flatten(1), meant.flatten(1), dim=-1).min()
        else:
            alike = torch.cosine_similarity(done.mean(1), meant.mean(1), dim=-1).min()
        return {
            "worst": float(gap.max()),
            "cosine": float(alike),
            "rows": gap.numel(),
            "layers": len(layers),
            "one_pass": self.system.one_pass,
        }


def first_position(case: str, prompt: int) -> int:
    return prompt - 1 if case in ("capture_last_all_layers", "last_mixed", "chat_mix") else 0


def _sampled_requests(case: str, count: int) -> list[int]:
    """Return up to three requests whose rows are compared; of the chats, those that only capture."""
    asking = [i for i in range(count) if case != "chat_mix" or CHAT_ROLES[i % len(CHAT_ROLES)] == "capture"]
    if len(asking) <= SAMPLED_REQUESTS:
        return asking
    return [asking[0], asking[len(asking) // 2], asking[-1]]


def _about(plan: BenchPlan) -> dict[str, str]:
    """Return versions, and the device's name."""
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
        except Exception as e:  # noqa: BLE001 - the measuring process decides what a failed case means
            traceback.print_exc()
            reply = {"error": f"{type(e).__name__}: {str(e).strip()[:600]}"}
        print(json.dumps(reply), file=answers, flush=True)


def main() -> None:
    """Serve one system; stdout is kept for the answers, because vLLM and its processes print to it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    plan = BenchPlan.model_validate_json(Path(sys.argv[1]).read_text())
    from vllm_weir.bench.systems import known_systems

    with contextlib.suppress(KeyboardInterrupt):
        serve(plan, known_systems()[sys.argv[2]](plan, Path(sys.argv[3])), answers)


if __name__ == "__main__":
    main()
