"""Files of autoencoders as projects beside SAELens publish them, as the entries and weights that SAELens would have.

| format | what is there | who publishes so |
|---|---|---|
| sparsify | ``cfg.json``, ``sae.safetensors`` | EleutherAI |
| dictionary_learning | ``config.json``, ``ae.pt`` | dictionary_learning, SAEBench |
| llama_scope | ``hyperparams.json``, ``checkpoints/final.safetensors`` | OpenMOSS |
| gemma_scope_2 | ``config.json``, ``params.safetensors`` | Google |
| qwen_scope | ``layer7.sae.pt`` in a folder ``...-L0_50`` | Qwen |
| linear_layers | ``.pt``, ``.pth`` with ``encoder_linear.weight`` or ``encoder.weight`` | Goodfire, OpenMOSS |
| circuit_tracer | ``layer_7.safetensors``, ``config.yaml`` beside it | circuit-tracer |

Cross-layer transcoders are in `cross_layer_files`.

Each reader returns the entries of a ``cfg.json`` of SAELens and the tensors under SAELens's names. What a file does
not say, and its path does not either, is left out, so that `parse_cfg` asks for it. Arithmetic that Weir does not have
is refused by its name.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from safetensors import safe_open

from vllm_weir.errors import MissingFile, WeirError, brief
from vllm_weir.schema.fields import is_json, loads
from vllm_weir.util.foreign_files import MAX_NAMES, damage_refused, load_torch, open_regular, stand_in

Entries = dict[str, Any]
Tensors = dict[str, torch.Tensor]


class Format(NamedTuple):
    """A published format: its name, whether a path is of it, and what reads it."""

    name: str
    is_it: Callable[[Path], bool]
    read: Callable[[Path], tuple[Entries, Tensors]]


def format_of(path: Path) -> Format | None:
    return next((one for one in FORMATS if one.is_it(path)), None)


def _has(*names: str) -> Callable[[Path], bool]:
    return lambda path: path.is_dir() and all((path / name).exists() for name in names)


def _sparsify(path: Path) -> tuple[Entries, Tensors]:
    cfg = read_json(path / "cfg.json")
    if cfg.get("activation", "topk") != "topk":
        raise WeirError(f"{brief(cfg.get('activation'))} is not supported; topk is", "activation")
    transcoder, skip = bool(cfg.get("transcode")), bool(cfg.get("skip_connection"))
    if skip and not transcoder:
        raise WeirError("a skip connection is supported in transcoders alone", "skip_connection")
    weights = read_safetensors(path / "sae.safetensors")
    tensors = _linear(weights, "encoder", "decoder")
    if skip and "W_skip" in weights:
        tensors["W_skip"] = weights["W_skip"]
    kind = ("abstopk" if cfg.get("signed") else "topk") + "_skip" * skip + "_transcoder" * transcoder
    entries = {"architecture": kind, "k": cfg.get("k"), "apply_b_dec_to_input": not transcoder}
    name = path.resolve().name
    if transcoder:
        layer = re.search(r"(?:layers|h)[._](\d+)[._]mlp$", name)
        return entries | _at(layer, "hook_mlp_in") | _at(layer, "hook_mlp_out", "hook_name_out"), tensors
    return entries | _at(re.search(r"layers[._](\d+)$", name), "hook_resid_post"), tensors


def _dictionary_learning(path: Path) -> tuple[Entries, Tensors]:
    trainer = read_json(path / "config.json").get("trainer")
    if not isinstance(trainer, Mapping):
        raise WeirError("config.json has no trainer", "trainer")
    kind, weights = trainer.get("dict_class"), _torch_tensors(path / "ae.pt")
    found = _linear(weights, "encoder", "decoder")
    entries: Entries = {"apply_b_dec_to_input": True, "model_name": trainer.get("lm_name")}
    match kind:
        case "AutoEncoder":
            entries["architecture"] = "standard"
        case "AutoEncoderNew":
            entries |= {"architecture": "standard", "apply_b_dec_to_input": False}
        case "GatedAutoEncoder":
            entries["architecture"] = "gated"
            found |= {"r_mag": weights["r_mag"], "b_gate": weights["gate_bias"], "b_mag": weights["mag_bias"]}
            found.pop("b_enc", None)
        case "JumpReluAutoEncoder":
            entries |= {"architecture": "jumprelu", "apply_b_dec_to_input": False}
            found["threshold"] = weights["threshold"]
        case "AutoEncoderTopK":
            entries |= {"architecture": "topk", "k": trainer.get("k")}
        case "BatchTopKSAE" | "MatryoshkaBatchTopKSAE":
            entries["architecture"] = "jumprelu"
            # Activations are cut off at 0 before they are compared with it.
            found["threshold"] = weights["threshold"].clamp(min=0).expand(found["W_enc"].shape[1]).contiguous()
        case _:
            raise WeirError(f"{brief(kind)!r} is not supported", "dict_class")
    named = str(trainer.get("submodule_name") or "resid_post")
    layer = trainer.get("layer")
    if "resid_post" in named and isinstance(layer, int):
        entries["hook_name"] = f"blocks.{layer}.hook_resid_post"
    return entries, found


def _llama_scope(path: Path) -> tuple[Entries, Tensors]:
    cfg = read_json(path / "hyperparams.json")
    if cfg.get("hook_point_out", cfg.get("hook_point_in")) != cfg.get("hook_point_in"):
        raise WeirError("transcoders of Llama Scope are not supported", "hook_point_out")
    try:
        norm, threshold = cfg["dataset_average_activation_norm"]["in"], float(cfg["jump_relu_threshold"])
        factor = math.sqrt(cfg["d_model"]) / norm
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as e:
        raise WeirError(f"hyperparams.json lacks {e}", "hyperparams.json") from None
    tensors = _linear(read_safetensors(path / "checkpoints" / "final.safetensors"), "encoder", "decoder")
    # As SAELens reads them: the threshold is stored in units of rows that are not scaled.
    tensors["threshold"] = torch.full((tensors["W_enc"].shape[1],), threshold * factor)
    entries = {"architecture": "jumprelu", "apply_b_dec_to_input": False, "hook_name": cfg.get("hook_point_in")}
    return entries | {"normalize_activations": "expected_average_only_in", "own_scaling_factor": factor}, tensors


def _gemma_scope_2(path: Path) -> tuple[Entries, Tensors]:
    cfg = read_json(path / "config.json")
    if cfg.get("architecture") != "jump_relu":
        raise WeirError(f"{brief(cfg.get('architecture'))!r} is not supported; jump_relu is", "architecture")
    found = read_safetensors(path / "params.safetensors")
    tensors = {name: found[key] for name, key in _LOWER.items() if key in found}
    if "W_dec" in tensors and tensors["W_dec"].ndim != 2:
        raise WeirError(f"{_CROSS_LAYER}, whose files are params_layer_0.safetensors and so on", "w_dec")
    inside = "/".join(path.resolve().parts[-3:])
    layer = re.search(r"layer_(\d+)", inside)
    entries: Entries = {"architecture": "jumprelu", "apply_b_dec_to_input": False, "model_name": cfg.get("model_name")}
    if "transcoder" in inside:
        entries["architecture"] = "jumprelu_transcoder"
        if "affine_skip_connection" in found:
            entries["architecture"] = "jumprelu_skip_transcoder"
            tensors["W_skip"] = found["affine_skip_connection"].T.contiguous()
        return entries | _at(layer, "hook_mlp_in") | _at(layer, "hook_mlp_out", "hook_name_out"), tensors
    hook = next((hook for part, hook in _GEMMA_HOOKS.items() if part in inside), None)
    return entries | (_at(layer, hook) if hook else {}), tensors


_LOWER = {"W_enc": "w_enc", "W_dec": "w_dec", "b_enc": "b_enc", "b_dec": "b_dec", "threshold": "threshold"}
_GEMMA_HOOKS = {"resid_post": "hook_resid_post", "attn_out": "attn.hook_z", "mlp_out": "hook_mlp_out"}
"""Part of the path -> TransformerLens's name; its autoencoders of attention read what the heads give."""
_CROSS_LAYER = "this is a part of a cross-layer transcoder; give the directory"


def _qwen_scope(path: Path) -> tuple[Entries, Tensors]:
    layer, k = re.search(r"layer(\d+)", path.name), re.search(r"L0_(\d+)", str(path.resolve()))
    if k is None:
        raise WeirError(
            "the file does not say how many features are active; keep the name of its folder, such as "
            "SAE-Res-Qwen3-1.7B-Base-W32K-L0_50",
            "k",
        )
    found = _torch_tensors(path)
    tensors: Tensors = {name: found[name] for name in ("W_enc", "W_dec", "b_enc", "b_dec") if name in found}
    tensors |= {name: tensors[name].T.contiguous() for name in ("W_enc", "W_dec") if name in tensors}
    entries = {"architecture": "topk", "k": int(k[1]), "apply_b_dec_to_input": False}
    return entries | _at(layer, "hook_resid_post"), tensors


def _linear_layers(path: Path) -> tuple[Entries, Tensors]:
    weights = _torch_tensors(path)
    names = ("encoder_linear", "decoder_linear") if "encoder_linear.weight" in weights else ("encoder", "decoder")
    if f"{names[0]}.weight" not in weights:
        raise WeirError(
            f"it has {brief(sorted(weights), 200)}, not the weights of an encoder and a decoder; if it is a file of "
            "dictionary_learning, give the directory that has config.json beside it",
            path.name,
        )
    entries = {"architecture": "standard", "apply_b_dec_to_input": False}
    return entries | _at(re.search(r"[-_]l(\d+)", path.name), "hook_resid_post"), _linear(weights, *names)


def _circuit_tracer(path: Path) -> tuple[Entries, Tensors]:
    found = read_safetensors(path)
    if not {"W_enc", "W_dec", "b_enc", "b_dec"} <= set(found):
        cross = any(re.fullmatch(r"(W_enc|W_dec|b_enc)_\d+", name) for name in found)
        why = f"it has {brief(sorted(found), 200)}, not the weights of a transcoder"
        if cross:
            why = f"{_CROSS_LAYER}, with files W_enc_0, W_dec_0 and so on"
        raise WeirError(why, path.name)
    tensors: Tensors = {name: found[name] for name in ("W_enc", "W_dec", "b_enc", "b_dec", "W_skip") if name in found}
    tensors["W_enc"] = tensors["W_enc"].T.contiguous()
    threshold = found.get("activation_function.threshold", found.get("threshold"))
    if threshold is not None:
        tensors["threshold"] = threshold.flatten().expand(tensors["W_enc"].shape[1]).contiguous()
    kind = ("jumprelu_" if threshold is not None else "") + ("skip_" if "W_skip" in tensors else "") + "transcoder"
    layer = re.search(r"layer_(\d+)", path.name)
    entries = {"architecture": kind, "apply_b_dec_to_input": False}
    config = path.parent / "config.yaml"
    cfg = read_yaml(config) if config.exists() else {}
    read = CIRCUIT_HOOKS.get(str(cfg.get("feature_input_hook", "mlp.hook_in")))
    written = CIRCUIT_HOOKS.get(str(cfg.get("feature_output_hook", "hook_mlp_out")))
    if layer is None or read is None or written is None:
        return entries, tensors
    return entries | _at(layer, read) | _at(layer, written, "hook_name_out"), tensors


CIRCUIT_HOOKS = {
    "mlp.hook_in": "hook_mlp_in", "hook_mlp_in": "hook_mlp_in", "ln2.hook_normalized": "ln2.hook_normalized",
    "hook_resid_mid": "hook_resid_mid", "hook_mlp_out": "hook_mlp_out", "mlp.hook_out": "hook_mlp_out",
}  # fmt: skip
"""Names of circuit-tracer -> TransformerLens's, as SAELens has them in files."""


def _at(layer: re.Match[str] | None, hook: str, entry: str = "hook_name") -> Entries:
    return {} if layer is None else {entry: f"blocks.{layer[1]}.{hook}"}


def _linear(weights: Tensors, encoder: str, decoder: str) -> Tensors:
    """Return weights of `torch.nn.Linear` layers, or under SAELens's own names, as SAELens has them."""
    enc, dec = weights.get(f"{encoder}.weight"), weights.get(f"{decoder}.weight")
    found = {
        "W_enc": weights.get("W_enc") if enc is None else enc.T.contiguous(),
        "W_dec": weights.get("W_dec") if dec is None else dec.T.contiguous(),
        "b_enc": weights.get(f"{encoder}.bias", weights.get("b_enc")),
        "b_dec": next((weights[n] for n in ("b_dec", f"{decoder}.bias", "bias", "decoder_bias") if n in weights), None),
    }
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _torch_tensors(path: Path) -> Tensors:
    state = load_torch(path, "path")
    if not isinstance(state, Mapping):
        raise WeirError(f"it holds a {type(state).__name__}, not tensors by name", path.name)
    return {str(name): tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


FORMATS = (
    Format("sparsify", _has("cfg.json", "sae.safetensors"), _sparsify),
    Format("dictionary_learning", _has("config.json", "ae.pt"), _dictionary_learning),
    Format("llama_scope", _has("hyperparams.json", "checkpoints/final.safetensors"), _llama_scope),
    Format("gemma_scope_2", _has("config.json", "params.safetensors"), _gemma_scope_2),
    Format("qwen_scope", lambda path: path.is_file() and path.name.endswith(".sae.pt"), _qwen_scope),
    Format("linear_layers", lambda path: path.is_file() and path.suffix in (".pt", ".pth"), _linear_layers),
    Format(
        "circuit_tracer",
        lambda path: path.is_file() and bool(re.fullmatch(r"layer_\d+\.safetensors", path.name)),
        _circuit_tracer,
    ),
)
"""In the order in which they are tried."""


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
