"""The weights of runs, and kept rows beside those of transformers in fp32, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_weir.bench.cases import CASES
from vllm_weir.bench.plan import BenchPlan
from vllm_weir.bench.result import RowCheck
from vllm_weir.util.transformers_reference import TransformersReference

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "bos_token_id": 128000, "eos_token_id": 128001, "max_position_embeddings": 131072,
    "hidden_act": "silu", "rms_norm_eps": 1e-05, "initializer_range": 0.02, "tie_word_embeddings": False,
    "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "use_cache": True, "torch_dtype": "bfloat16",
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip

FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def make_model(directory: Path, config: dict[str, Any] = LLAMA_8B) -> str:
    """Write the configuration, and return the directory's name."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return str(directory)


def add_tokenizer(directory: str, words: int) -> None:
    """Give a model a tokenizer of `words` tokens, which are the words w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, unk_token="w0", pad_token="w0")
    tokenizer.save_pretrained(directory)


def draw(name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight called `name`: the same values in every process on the same kind of device."""
    if len(shape) == 1:
        return torch.ones(shape, device=device, dtype=dtype)
    source = torch.Generator(device=device).manual_seed(zlib.crc32(name.encode()))
    scale = 1.0 if "embed_tokens" in name else 0.02
    return torch.empty(shape, device=device, dtype=dtype).normal_(0.0, scale, generator=source)


@torch.no_grad()
def fill_engine(model: torch.nn.Module) -> int:
    """Draw every weight of vLLM's model in place, so that captured graphs stay valid, and return how many there are.

    vLLM's dummy weights are below 1e-3: a block then changes its stream by less than a bfloat16 rounding, every layer's
    rows are the embeddings, and no comparison could tell one block from another.
    """
    count = 0
    for name, parameter in model.named_parameters():
        parameter.copy_(draw(name, tuple(parameter.shape), parameter.device, parameter.dtype))
        count += 1
    return count


def transformers_model(plan: BenchPlan) -> Any:
    """Return transformers' model of a run, in its dtype and on its device, with the weights that the engines have."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device("cuda" if plan.cuda else "cpu")
    dtype = getattr(torch, plan.dtype)
    if not plan.dummy:
        return AutoModelForCausalLM.from_pretrained(plan.model, dtype=dtype).to(device)
    with device:
        net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(plan.model), dtype=dtype)
    fill_reference(net)
    return net


@torch.no_grad()
def fill_reference(net: torch.nn.Module) -> None:
    """Draw the same weights for transformers' Llama, whose projections are not fused."""
    parameters = dict(net.named_parameters())
    for name, parameter in parameters.items():
        part = name.split(".")[-2]
        if part not in FUSED:
            parameter.copy_(draw(name, tuple(parameter.shape), parameter.device, parameter.dtype))
            continue
        parts = [p for p, fused in FUSED.items() if fused == FUSED[part]]
        sizes = [parameters[name.replace(part, p)].shape[0] for p in parts]
        shape = (sum(sizes), parameter.shape[1])
        whole = draw(name.replace(part, FUSED[part]), shape, parameter.device, parameter.dtype)
        parameter.copy_(whole.split(sizes)[parts.index(part)])


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
