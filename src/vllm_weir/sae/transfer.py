"""An autoencoder on its way between processes: one safetensors file, which is read back as it was."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_weir.errors import StoreError
from vllm_weir.sae.autoencoder import SAE
from vllm_weir.sae.config import SAEConfig
from vllm_weir.sae.tensors import for_file
from vllm_weir.schema.hooks import Site

_CONFIG = "sae"
_SITES = ("site", "out_site")


def write(sae: SAE, path: Path) -> None:
    """Write an autoencoder without what its file said beside (`SAEConfig.metadata`)."""
    config = asdict(replace(sae.config, metadata={}))
    try:
        save_file(for_file(sae.tensors), path, {_CONFIG: json.dumps(config)})
    except (OSError, SafetensorError) as e:
        raise StoreError(f"cannot write {path.parent}: {str(e)[:80]}", "sae") from None


def read(path: Path, device: str | torch.device = "cpu") -> SAE:
    """Read what `write` wrote; on a CPU the weights are mapped from the file and read when they are used."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            config = json.loads(file.metadata()[_CONFIG])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as e:
        raise StoreError(f"cannot read {path}: {str(e)[:80]}", "sae") from None
    config |= {name: None if config[name] is None else Site(*config[name]) for name in _SITES}
    return SAE(SAEConfig(**config), tensors).to(device)
