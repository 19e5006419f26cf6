"""An autoencoder on its way between processes, as one safetensors file; and the digest of what it computes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_weir.errors import StoreError
from vllm_weir.sae.autoencoder import SAE
from vllm_weir.sae.config import SAEConfig
from vllm_weir.sae.tensors import for_file
from vllm_weir.schema.hooks import Site

BLOCK = 1 << 24
"""Values that are hashed at a time."""
LATER = ("residual_threshold", "stop_on_duplicate_support", "layers", "writes")
"""Fields of a configuration that digests in files do not know; as they are by default, they do not count."""


def digest_of(sae: SAE) -> str:
    """Return the digest of what an autoencoder computes, hexadecimal; saved and loaded again it has the same.

    Its name, metadata and labels do not count.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = asdict(replace(sae.config, architecture=sae.config.saved_architecture, name="", metadata={}))
    del config["labels"]
    for one in fields(SAEConfig):
        if one.name in LATER and config[one.name] == one.default:
            del config[one.name]
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name in sorted(sae.tensors):
        tensor = sae.tensors[name].detach()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        for values in tensor.contiguous().view(-1).split(BLOCK):
            digest.update(values.cpu().view(torch.uint8).numpy())
    return digest.hexdigest()


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
