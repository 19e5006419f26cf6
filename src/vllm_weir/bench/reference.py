"""Kept rows against transformers on the same tokens and weights, in fp32, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_weir.bench.plan import CASES, BenchPlan
from vllm_weir.bench.result import RowCheck

LIMIT = 900.0


def compare(plan: BenchPlan, samples: Sequence[tuple[str, Path]], workdir: Path) -> list[RowCheck]:
    """A check for every capture case of every system; a comparison that cannot be made is a failed one."""
    path = workdir / "reference-plan.json"
    path.write_text(plan.model_dump_json())
    command = [sys.executable, "-m", "vllm_weir.bench.reference", str(path)]
    command += [f"{name}={file}" for name, file in samples]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        lines = done.stdout.strip().splitlines()
        if done.returncode == 0 and lines:
            return [RowCheck.model_validate(c) for c in json.loads(lines[-1])]
        problem = " | ".join(done.stderr.strip().splitlines()[-3:])[-400:]
    except subprocess.TimeoutExpired:
        problem = f"not done within {LIMIT:.0f} s"
    return [_no_reference(name, problem) for name in sorted({name for name, _ in samples})]


def _no_reference(name: str, problem: str) -> RowCheck:
    what = f"no comparison with transformers: {problem}"
    return RowCheck(system=name, case="", size="", what=what, value=1e9, bound=0.0, rows=0, passed=False)


class Reference:
    """transformers' blocks, first in the engine's dtype and then in fp32."""

    def __init__(self, plan: BenchPlan) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.device = torch.device("cuda" if plan.cuda else "cpu")
        dtype = getattr(torch, plan.dtype)
        if plan.dummy:
            from vllm_weir.bench.weights import fill_reference

            with self.device:
                net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(plan.model), dtype=dtype)
            fill_reference(net)
        else:
            net = AutoModelForCausalLM.from_pretrained(plan.model, dtype=dtype).to(self.device)
        self.net = net.eval()
        stacks = [m for m in net.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == plan.layers]
        self.found: list[torch.Tensor] = []
        for block in stacks[0]:
            block.register_forward_hook(self._keep)

    def _keep(self, _module: Any, _inputs: Any, out: Any) -> None:
        self.found.append((out[0] if isinstance(out, tuple) else out)[0])

    @torch.no_grad()
    def rows(self, ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """float32 [layers, positions, d] on the CPU."""
        self.found.clear()
        self.net(input_ids=ids[None].to(self.device), use_cache=False)
        return torch.stack([f[at.to(self.device)] for f in self.found]).float().cpu()


def distance(rows: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest 1 - cosine of any row; infinite if one is not finite."""
    if not bool(torch.isfinite(rows).all()):
        return float("inf")
    return float((1 - torch.cosine_similarity(rows.double(), truth.double(), dim=-1)).max())


def examine(plan: BenchPlan, files: Sequence[tuple[str, Path]]) -> list[RowCheck]:
    """Compare every sample; the bound for bfloat16 is three times transformers' own error in bfloat16."""
    from safetensors.torch import load_file

    kept = {(name, key): t for name, path in files for key, t in load_file(path).items()}
    wanted = {(name, key.removesuffix("|rows")): t for (name, key), t in kept.items() if key.endswith("|rows")}
    net = Reference(plan)

    def every() -> dict[tuple[str, str], torch.Tensor]:
        return {(s, k): net.rows(kept[s, f"{k}|ids"], kept[s, f"{k}|at"]) for s, k in wanted}

    own = every()
    net.net.float()
    truth = every() if plan.dtype != "float32" else own
    checks: dict[tuple[str, str, str], RowCheck] = {}
    for (system, key), rows in wanted.items():
        case, size, _ = key.split("|")
        value = distance(rows, truth[system, key])
        of_transformers = distance(own[system, key], truth[system, key])
        other = neighbours(rows, truth[system, key])
        old = checks.get((system, case, size))
        value = max(value if value < 1e9 else 1e9, old.value if old else 0.0)
        bound = 1e-5 if plan.dtype == "float32" else max(1e-3, 3 * of_transformers, old.bound if old else 0.0)
        count = rows.shape[0] * rows.shape[1] + (old.rows if old else 0)
        detail = {"transformers_in_this_dtype": of_transformers, "row_of_next_block": other}
        if old:
            detail = {
                "transformers_in_this_dtype": max(of_transformers, old.detail["transformers_in_this_dtype"]),
                "row_of_next_block": min(other, old.detail["row_of_next_block"]),
            }
        what = "1 - cosine to transformers in fp32, worst row"
        checks[system, case, size] = RowCheck(
            system=system, case=case, size=size, what=what, value=value, bound=bound, rows=count,
            passed=value <= bound and bound < detail["row_of_next_block"], detail=detail,
        )  # fmt: skip
    return sorted(checks.values(), key=lambda c: (c.system, CASES.index(c.case), c.size))


def neighbours(rows: torch.Tensor, truth: torch.Tensor) -> float:
    """The smallest 1 - cosine to the next block's row: what a shift by one block would be seen by."""
    return float((1 - torch.cosine_similarity(rows[:-1].double(), truth[1:].double(), dim=-1)).min())


def main() -> None:
    """``reference PLAN.json NAME=FILE...``: the checks as one line of JSON."""
    plan = BenchPlan.model_validate_json(Path(sys.argv[1]).read_text())
    files = [(name, Path(path)) for name, path in (argument.split("=", 1) for argument in sys.argv[2:])]
    print(json.dumps([c.model_dump() for c in examine(plan, files)]))


if __name__ == "__main__":
    main()
