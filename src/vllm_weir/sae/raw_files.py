"""Content of the files of autoencoders, within bounds. Nothing in them is executed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open

from vllm_weir.errors import MissingFile, WeirError
from vllm_weir.schema.json_text import is_json, loads
from vllm_weir.util.foreign_files import MAX_NAMES, damage_refused, open_regular, stand_in

MAX_TEXT_BYTES = 1 << 24


def read_text(path: Path) -> bytes:
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > MAX_TEXT_BYTES:
            raise WeirError(f"more than {MAX_TEXT_BYTES} bytes", path.name)
        return file.read()


def read_json(path: Path) -> dict[str, Any]:
    data = read_text(path)
    if reason := stand_in(data) if not is_json(data) else "":
        raise WeirError(f"no JSON: {reason}", path.name)
    found = loads(data, path.name)
    if not isinstance(found, dict):
        raise WeirError(f"expected an object, got {type(found).__name__}", path.name)
    return found


def read_yaml(path: Path) -> dict[str, Any]:
    with damage_refused("no YAML", path.name):
        try:
            found = yaml.safe_load(read_text(path))
        except yaml.YAMLError as e:
            raise ValueError(str(e)) from None
    if not isinstance(found, dict):
        raise WeirError(f"expected a mapping, got {type(found).__name__}", path.name)
    return found


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, mapped from it; raise WeirError, naming the file, if it is damaged."""
    if not path.exists():
        raise MissingFile(f"{path.parent} has no {path.name}", "path")
    with open_regular(path) as opened:
        head = opened.read(1024)
    says = "truncated, damaged or no safetensors file"
    with damage_refused(says, path.name, head), safe_open(path, framework="pt", device="cpu") as weights:
        names = list(weights.keys())
        if len(names) > MAX_NAMES:
            raise ValueError(f"{len(names)} names, more than the limit of {MAX_NAMES}")
        return {name: weights.get_tensor(name) for name in names}
