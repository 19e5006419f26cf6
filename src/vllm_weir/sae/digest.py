"""The digest of a sparse autoencoder: equal for equal configurations and weights."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields, replace

import torch

from vllm_weir.sae.autoencoder import SAE
from vllm_weir.sae.config import SAEConfig

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
