"""Files of cross-layer transcoders, as circuit-tracer and Gemma Scope 2 publish them.

| format | what is there | who publishes so |
|---|---|---|
| circuit_tracer | ``W_enc_0.safetensors``, ``W_dec_0.safetensors`` and so on, ``config.yaml`` | circuit-tracer |
| gemma_scope_2 | ``params_layer_0.safetensors`` and so on | Google, in its folder ``clt`` |

A reader returns, for each block, what a reader of `published` returns for a transcoder: the entries of a ``cfg.json``
of SAELens and the tensors under SAELens's names. The decoder is [d_sae, blocks from this one on, d_out].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

from vllm_weir.errors import MissingFile, WeirError
from vllm_weir.sae import cross_layer
from vllm_weir.sae.config import SAEConfig
from vllm_weir.sae.published import CIRCUIT_HOOKS, Entries, Tensors, read_json, read_safetensors, read_yaml
from vllm_weir.sae.saelens import hook_name

Blocks = Sequence[tuple[Entries, Tensors]]
Shape = tuple[int, ...]

_CIRCUIT, _SCOPE = re.compile(r"W_(?:enc|dec)_(\d+)\.safetensors"), re.compile(r"params_layer_(\d+)\.safetensors")
_DEFAULT_HOOKS = ("hook_resid_mid", "hook_mlp_out")
"""What circuit-tracer reads and writes where nothing says it."""


class CrossLayerFormat(NamedTuple):
    """A published format: its name, the files that it is known by, and what reads a directory."""

    name: str
    files: re.Pattern[str]
    read: Callable[[Path], Blocks]


def format_of(path: Path) -> CrossLayerFormat | None:
    if not path.is_dir():
        return None
    return next((one for one in FORMATS if _numbers(path, one.files)), None)


def as_files(config: SAEConfig, tensors: Tensors) -> dict[str, Tensors]:
    """Return the tensors of each file in which circuit-tracer keeps a cross-layer transcoder, by the file's name.

    A skip connection, which circuit-tracer does not write, is beside the encoder under the name ``W_skip_0``.
    """
    if config.encodes_rows or config.layers[0] != 0:
        raise WeirError("circuit-tracer's files have ReLU and JumpReLU alone, from block 0 on", "architecture")
    out: dict[str, Tensors] = {}
    for layer in config.layers:
        own = cross_layer.block_tensors(config, tensors, layer)
        decoder = own.pop("W_dec")
        turned = {name: one.T.contiguous() if name in ("W_enc", "W_skip") else one for name, one in own.items()}
        if "threshold" in turned:  # below 0 ReLU decides here, and not in circuit-tracer
            turned["threshold"] = turned["threshold"].clamp(min=0)
        out[f"W_enc_{layer}.safetensors"] = cross_layer.joined([(layer, turned)])
        out[f"W_dec_{layer}.safetensors"] = cross_layer.joined([(layer, {"W_dec": decoder})])
    return out


def config_yaml(config: SAEConfig) -> str:
    """Return circuit-tracer's ``config.yaml``."""
    assert config.out_site is not None
    read, written = (hook_name(site).split(".", 2)[2] for site in (config.site, config.out_site))
    entries = {
        "model_name": str(config.metadata.get("model_name") or ""),
        "model_kind": "cross_layer_transcoder",
        "feature_input_hook": "mlp.hook_in" if config.site.hook == "mlp_in" else read,
        "feature_output_hook": written,
    }
    return yaml.safe_dump(entries, sort_keys=False)


def _circuit_tracer(path: Path) -> Blocks:
    count = _count(path, _CIRCUIT)
    hooks, model = _hooks(path)
    first = read_safetensors(path / "W_enc_0.safetensors")
    if "b_enc_0" not in first and (path / "W_dec_norm.safetensors").exists():
        raise WeirError(
            "it chooses its features among those of all blocks together, so that an activation depends on later "
            "blocks; that is not supported",
            "W_dec_norm.safetensors",
        )
    d_sae, d_in = _matrix(first, "W_enc_0", "W_enc_0.safetensors")
    d_out = _vector(first, "b_dec_0", "W_enc_0.safetensors")
    blocks = []
    for layer in range(count):
        entries, tensors = _circuit_block(path, layer, count, d_in, d_sae, d_out, threshold="threshold_0" in first)
        hook_names = dict(zip(("hook_name", "hook_name_out"), (f"blocks.{layer}.{hook}" for hook in hooks)))
        blocks.append((entries | hook_names | {"model_name": model}, tensors))
    return blocks


def _circuit_block(
    path: Path, layer: int, count: int, d_in: int, d_sae: int, d_out: int, threshold: bool
) -> tuple[Entries, Tensors]:
    files = [f"W_{part}_{layer}.safetensors" for part in ("enc", "dec")]
    encoder, decoder = (read_safetensors(path / file) for file in files)
    shapes: dict[str, Shape] = {"W_enc": (d_sae, d_in), "b_enc": (d_sae,), "b_dec": (d_out,)}
    if threshold:
        shapes["threshold"] = (d_sae,)
    if f"W_skip_{layer}" in encoder:
        shapes["W_skip"] = (d_in, d_out)
    tensors = {name: _checked(encoder, f"{name}_{layer}", shape, files[0]) for name, shape in shapes.items()}
    if threshold and bool((tensors["threshold"] < 0).any()):
        raise WeirError(
            f"threshold_{layer} has values below 0, with which circuit-tracer's JumpReLU gives negative activations; "
            "that is not supported",
            files[0],
        )
    tensors["W_dec"] = _checked(decoder, f"W_dec_{layer}", (d_sae, count - layer, d_out), files[1])
    for name in ("W_enc", "W_skip"):
        if name in tensors:
            tensors[name] = tensors[name].T.contiguous()
    kind = "jumprelu_" * threshold + "skip_" * ("W_skip" in tensors) + "transcoder"
    return {"architecture": kind, "apply_b_dec_to_input": False}, tensors


def _hooks(path: Path) -> tuple[tuple[str, str], str]:
    """Return TransformerLens's names of the points that are read and written, without their block, and the model."""
    config = path / "config.yaml"
    entries = read_yaml(config) if config.exists() else {}
    found = []
    for name, default in zip(("feature_input_hook", "feature_output_hook"), _DEFAULT_HOOKS):
        given = str(entries.get(name, default))
        if given not in CIRCUIT_HOOKS:
            raise WeirError(f"{given[:80]!r} is not supported; known are {', '.join(CIRCUIT_HOOKS)}", name)
        found.append(CIRCUIT_HOOKS[given])
    return (found[0], found[1]), str(entries.get("model_name") or "")


def _gemma_scope_2(path: Path) -> Blocks:
    count = _count(path, _SCOPE)
    cfg = read_json(path / "config.json") if (path / "config.json").exists() else {}
    if cfg.get("architecture", "jump_relu") != "jump_relu":
        raise WeirError("only jump_relu is supported", "architecture")
    name = "params_layer_0.safetensors"
    first = read_safetensors(path / name)
    (d_in, d_sae), d_out = _matrix(first, "w_enc", name), _vector(first, "b_dec", name)
    shapes: dict[str, Shape] = {
        "w_enc": (d_in, d_sae), "w_dec": (d_sae, count, d_out), "b_enc": (d_sae,), "b_dec": (d_out,),
        "threshold": (d_sae,),
    }  # fmt: skip
    if skip := "affine_skip_connection" in first:
        shapes["affine_skip_connection"] = (d_in, d_out)
    blocks = []
    for layer in range(count):
        file = f"params_layer_{layer}.safetensors"
        found = read_safetensors(path / file)
        own = {name: _checked(found, name, shape, file) for name, shape in shapes.items()}
        if bool(own["w_dec"][:, :layer].any()):
            raise WeirError(f"features of block {layer} write at blocks before it, which have run by then", file)
        tensors = {"W_enc": own["w_enc"], "W_dec": own["w_dec"][:, layer:], "b_enc": own["b_enc"]}
        tensors |= {"b_dec": own["b_dec"], "threshold": own["threshold"]}
        if skip:
            tensors["W_skip"] = own["affine_skip_connection"].T.contiguous()
        entries = {
            "architecture": "jumprelu_skip_transcoder" if skip else "jumprelu_transcoder",
            "apply_b_dec_to_input": False,
            "model_name": cfg.get("model_name"),
            "hook_name": f"blocks.{layer}.hook_mlp_in",
            "hook_name_out": f"blocks.{layer}.hook_mlp_out",
        }
        blocks.append((entries, tensors))
    return blocks


def _numbers(path: Path, pattern: re.Pattern[str]) -> list[int]:
    """Return the blocks that the files of a directory are for, each once and in order."""
    matches = (pattern.fullmatch(one.name) for one in path.iterdir())
    return sorted({int(match[1]) for match in matches if match is not None})


def _count(path: Path, pattern: re.Pattern[str]) -> int:
    found = _numbers(path, pattern)
    last = found[-1]
    if missing := sorted(set(range(last + 1)) - set(found)):
        raise MissingFile(f"{path} has files of block {last} and none of block {missing[0]}", "path")
    return last + 1


def _matrix(found: Tensors, name: str, file: str) -> tuple[int, int]:
    tensor = found.get(name)
    if tensor is None or tensor.ndim != 2:
        raise WeirError(f"expected a matrix {name}, got {_said(tensor)}", file)
    return tensor.shape[0], tensor.shape[1]


def _vector(found: Tensors, name: str, file: str) -> int:
    tensor = found.get(name)
    if tensor is None or tensor.ndim != 1:
        raise WeirError(f"expected a vector {name}, got {_said(tensor)}", file)
    return tensor.shape[0]


def _checked(found: Mapping[str, torch.Tensor], name: str, shape: Shape, file: str) -> torch.Tensor:
    tensor = found.get(name)
    if tensor is None or tuple(tensor.shape) != shape:
        raise WeirError(f"expected {name} of shape {list(shape)}, got {_said(tensor)}", file)
    return tensor


def _said(tensor: torch.Tensor | None) -> str:
    return "none" if tensor is None else f"shape {list(tensor.shape)}"


FORMATS = (
    CrossLayerFormat("circuit_tracer", _CIRCUIT, _circuit_tracer),
    CrossLayerFormat("gemma_scope_2", _SCOPE, _gemma_scope_2),
)
