"""Comparison of kept rows with transformers on the same tokens and weights, in fp32, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from vllm_weir.bench.cases import CASES
from vllm_weir.bench.plan import BenchPlan
from vllm_weir.bench.result import RowCheck
from vllm_weir.bench.weights import transformers_model
from vllm_weir.util.transformers_reference import TransformersReference

LIMIT = 900.0
"""Seconds that the comparison may take."""


def compare(plan: BenchPlan, samples: Sequence[tuple[str, Path]], workdir: Path) -> list[RowCheck]:
    """Return a check for every capture case of every system; a comparison that cannot be made is a failed one."""
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
        self.net = transformers_model(plan)
        self._reference = TransformersReference(self.net, plan.layers)

    def rows(self, ids: torch.Tensor, positions: torch.Tensor, mean: bool = False) -> torch.Tensor:
        """Return what leaves each block at some positions, or its mean over them: [layers, rows, d], fp32, CPU."""
        rows = self._reference.streams(ids, positions)[1].float()
        return (rows.mean(1, keepdim=True) if mean else rows).cpu()


def distance(rows: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the largest 1 - cosine of any row; infinity if one is not finite."""
    if not bool(torch.isfinite(rows).all()):
        return float("inf")
    return float((1 - torch.cosine_similarity(rows.double(), truth.double(), dim=-1)).max())


def examine(plan: BenchPlan, files: Sequence[tuple[str, Path]]) -> list[RowCheck]:
    """Compare every sample; the bound for bfloat16 is three times transformers' own error in bfloat16."""
    from safetensors.torch import load_file

    kept = {(name, key): t for name, path in files for key, t in load_file(path).items()}
    samples = sorted((name, key.removesuffix("|rows")) for name, key in kept if key.endswith("|rows"))
    net = Reference(plan)

    def rows_of_all() -> dict[tuple[str, str], torch.Tensor]:
        return {
            (s, k): net.rows(kept[s, f"{k}|ids"], kept[s, f"{k}|at"], mean=k.startswith("mean|")) for s, k in samples
        }

    own = rows_of_all()
    net.net.float()
    truth = rows_of_all() if plan.dtype != "float32" else own
    measured: dict[tuple[str, str, str], list[tuple[float, float, float, int]]] = {}
    for system, key in samples:
        case, size, _ = key.split("|")
        layers, rows = kept[system, f"{key}|layers"].tolist(), kept[system, f"{key}|rows"]
        true = truth[system, key]
        error, of_transformers = distance(rows, true[layers]), distance(own[system, key][layers], true[layers])
        one = (error, of_transformers, next_block(rows, true, layers), rows.shape[0] * rows.shape[1])
        measured.setdefault((system, case, size), []).append(one)
    checks = [_check(plan, *place, *zip(*of_case)) for place, of_case in measured.items()]
    return sorted(checks, key=lambda c: (c.system, CASES.index(c.case), c.size))


def _check(
    plan: BenchPlan,
    system: str,
    case: str,
    size: str,
    errors: Sequence[float],
    of_transformers: Sequence[float],
    next_blocks: Sequence[float],
    counts: Sequence[int],
) -> RowCheck:
    """Return the check of a case's samples: what each is from fp32, transformers' own is, and the next block is."""
    value, own, following = min(max(errors), 1e9), max(of_transformers), min(next_blocks)
    bound = 1e-5 if plan.dtype == "float32" else max(1e-3, 3 * own)
    return RowCheck(
        system=system, case=case, size=size, what="1 - cosine to transformers in fp32, worst row", value=value,
        bound=bound, rows=sum(counts), passed=value <= bound < following,
        detail={"transformers_in_this_dtype": own, "row_of_next_block": following},
    )  # fmt: skip


def next_block(rows: torch.Tensor, truth: torch.Tensor, layers: Sequence[int]) -> float:
    """Return the smallest 1 - cosine of rows to the next block's: what a shift by one block would be seen by.

    Rows are [blocks, n, d] of `layers`, of which the last has no block after it; truth [all layers, n, d].
    2.0 is returned if there is no other.
    """
    followed = [i for i, layer in enumerate(layers) if layer + 1 < len(truth)]
    if not followed:
        return 2.0
    after = truth[[layers[i] + 1 for i in followed]]
    return float((1 - torch.cosine_similarity(rows[followed].double(), after.double(), dim=-1)).min())


def main() -> None:
    """Print the checks of ``reference PLAN.json NAME=FILE...`` as one line of JSON."""
    plan = BenchPlan.model_validate_json(Path(sys.argv[1]).read_text())
    files = [(name, Path(path)) for name, path in (argument.split("=", 1) for argument in sys.argv[2:])]
    print(json.dumps([c.model_dump() for c in examine(plan, files)]))


if __name__ == "__main__":
    main()
