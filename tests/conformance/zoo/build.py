"""Checkpoint directories of tiny random models.

Weights are drawn so that a mistake shows: norms and biases are far from 1 and 0, every multiplier of a configuration is
set away from 1, blocks add about as much to the stream as they find in it.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.conformance.zoo.entry import Entry

VOCAB = 512
BLOCKS = 4
WIDTH = 128
COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=192,
    num_hidden_layers=BLOCKS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
"""What most configurations share. vLLM's CPU attention takes heads of 32 or wider."""

STATE = ("A_log", ".D", "dt_bias")
"""Ends of the names of what decays, feeds through and steps a state, whatever its shape."""

_GAIN = 1.2
_NORM_NOISE = 0.2

_CONFIG_CODE = '''"""The configuration of a checkpoint that transformers has no class for."""

from transformers import PreTrainedConfig


class Fields(dict):
    """Fields that are attributes and still written as JSON."""

    __getattr__ = dict.get


def attributes(value):
    if isinstance(value, dict):
        return Fields((k, attributes(v)) for k, v in value.items())
    return [attributes(v) for v in value] if isinstance(value, list) else value


class TinyConfig(PreTrainedConfig):
    model_type = {model_type!r}

    def __init__(self, **fields):
        if "block_configs" in fields:
            fields["block_configs"] = attributes(fields["block_configs"])
        for name, value in fields.items():
            setattr(self, name, value)
        super().__init__(**fields)
'''


def build(entry: Entry, where: Path) -> Path:
    """Write the checkpoint of an entry into the directory `where` and return it."""
    where.mkdir(parents=True, exist_ok=True)
    if entry.oracle:
        _with_transformers(entry, where)
    else:
        _configuration_only(entry, where)
    return where


def _with_transformers(entry: Entry, where: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(entry.model_type, **entry.fields())
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    fill(model, entry.architecture, entry.zero)
    model.save_pretrained(where)
    if entry.rename:
        rename(where / "model.safetensors", entry.rename)
    written = json.loads((where / "config.json").read_text())
    written["architectures"] = [entry.architecture]
    written.update(entry.config_json)
    (where / "config.json").write_text(json.dumps(written, indent=1))


def rename(checkpoint: Path, names: Mapping[str, str]) -> None:
    """Rename a checkpoint's tensors: parts of their names -> what stands there instead."""
    from safetensors.torch import load_file, save_file

    renamed = {}
    for path, tensor in load_file(checkpoint).items():
        for old, new in names.items():
            path = path.replace(old, new)
        renamed[path] = tensor
    save_file(renamed, checkpoint, {"format": "pt"})


def _configuration_only(entry: Entry, where: Path) -> None:
    """Only config.json: `loader.py` draws the weights of what transformers has no class for, inside vLLM."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    fields: dict[str, Any] = {
        "architectures": [entry.architecture],
        "model_type": entry.model_type,
        "torch_dtype": "float32",
        **entry.fields(),
        **entry.config_json,
    }
    if entry.model_type not in CONFIG_MAPPING_NAMES and entry.model_type not in _CONFIG_REGISTRY:
        fields["auto_map"] = {"AutoConfig": "configuration_tiny.TinyConfig"}
        (where / "configuration_tiny.py").write_text(_CONFIG_CODE.format(model_type=entry.model_type))
    (where / "config.json").write_text(json.dumps(fields, indent=1))


@torch.no_grad()
def fill(model: torch.nn.Module, name: str, zero: tuple[str, ...] = ()) -> None:
    """Random weights, each from its own seed, so that a change to one leaves the others as they were."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    transposed = {id(m.weight) for m in model.modules() if type(m).__name__ == "Conv1D"}
    for path, tensor in _tensors(model):
        if not tensor.is_floating_point():
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{path}".encode()))
        noise = torch.randn(tensor.shape, generator=generator).to(tensor)
        if zero and path.endswith(zero):
            tensor.zero_()
        elif id(tensor) in embeddings:
            tensor.copy_(0.5 * noise)
        elif path.endswith((".alpha_p", ".alpha_n")):
            tensor.fill_(exact_slope())
        elif near_initial(path, tensor):
            tensor.copy_(torch.nan_to_num(tensor) + _NORM_NOISE * noise)
        else:
            fan_in = tensor.shape[0] if id(tensor) in transposed else tensor.shape[-1]
            if tensor.ndim > 3:  # a convolution over pixels
                fan_in = tensor[0].numel()
            tensor.copy_(noise * (_GAIN / math.sqrt(fan_in)))


def near_initial(path: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor keeps the value it was made with, and noise on top.

    True of vectors (norms, biases, the decay and step of a state space) and of gains, whatever their shape.
    """
    if tensor.ndim < 2 or path.endswith(STATE):
        return True
    return bool((tensor == 1).all())


def exact_slope() -> float:
    """A number whose softplus, and that plus a half, bf16 nearly holds: vLLM keeps the slopes of xIELU in bf16."""
    numbers = torch.linspace(0.02, 6.0, 1 << 16).bfloat16().unique()
    softplus = torch.nn.functional.softplus(numbers.double())
    rounded = torch.nn.functional.softplus(numbers)
    apart = (rounded.double() - softplus).abs() + ((rounded + 0.5).double() - softplus - 0.5).abs()
    return float(numbers[(apart / softplus).argmin()])


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    saved = set(model.state_dict())
    for path, buffer in model.named_buffers():
        # The balancing bias of a router, the gain of a block; others are tables.
        if path in saved and path.endswith(("bias", "layer_scalar")):
            yield path, buffer
