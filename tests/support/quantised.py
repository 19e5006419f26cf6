"""GPTQ checkpoints of tiny models, and the same weights multiplied out for transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BITS, GROUP = 4, 32
_CENTRE = 1 << (BITS - 1)


def gptq(source: Path, packed: Path, plain: Path) -> None:
    """Write `source` with its blocks' matrices in 4 bits to `packed`, and what these stand for, in bf16, to `plain`."""
    tensors = load_file(source / "model.safetensors")
    small: dict[str, torch.Tensor] = {}
    exact: dict[str, torch.Tensor] = {}
    for name, weight in tensors.items():
        if weight.ndim != 2 or "layers." not in name or not name.endswith("proj.weight"):
            small[name] = exact[name] = weight.to(torch.bfloat16)
            continue
        parts, value = quantise(weight)
        stem = name.removesuffix(".weight")
        small |= {f"{stem}.{part}": tensor for part, tensor in parts.items()}
        exact[name] = value
    for where, content in ((packed, small), (plain, exact)):
        where.mkdir(parents=True)
        for file in source.iterdir():
            if file.name != "model.safetensors":
                shutil.copy(file, where)
        save_file({k: v.contiguous().clone() for k, v in content.items()}, where / "model.safetensors")
        config = json.loads((where / "config.json").read_text()) | {"dtype": "bfloat16"}
        if where is packed:
            config["quantization_config"] = {
                "quant_method": "gptq", "bits": BITS, "group_size": GROUP, "desc_act": False, "sym": True,
            }  # fmt: skip
        (where / "config.json").write_text(json.dumps(config))


def quantise(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """GPTQ's tensors for `weight` [out, in], and the weight that they stand for."""
    out, width = weight.shape
    groups = weight.float().reshape(out, width // GROUP, GROUP)
    scales = (groups.abs().amax(-1) / (_CENTRE - 1)).to(torch.bfloat16)  # [out, groups]
    codes = (groups / scales.float()[..., None]).round().clamp(-_CENTRE, _CENTRE - 1)
    value = (codes * scales.float()[..., None]).reshape(out, width).to(torch.bfloat16)
    unsigned = (codes.reshape(out, width).T + _CENTRE).to(torch.int64)  # [in, out]
    zeros = torch.full((width // GROUP, out), _CENTRE - 1, dtype=torch.int64)
    return {
        "qweight": _pack(unsigned, 0),
        "qzeros": _pack(zeros, 1),
        "scales": scales.T.contiguous(),
        "g_idx": torch.arange(width, dtype=torch.int32) // GROUP,
    }, value


def _pack(codes: torch.Tensor, dim: int) -> torch.Tensor:
    per_word = 32 // BITS
    codes = codes.movedim(dim, 0)
    words = codes.reshape(codes.shape[0] // per_word, per_word, -1)
    packed = sum(words[:, i] << (BITS * i) for i in range(per_word))
    assert isinstance(packed, torch.Tensor)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed)
    return packed.to(torch.int32).movedim(0, dim).contiguous()
