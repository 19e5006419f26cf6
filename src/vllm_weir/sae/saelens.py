"""SAELens's ``cfg.json``, of version 6 and earlier: its entries and hook names, and what is folded for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vllm_weir.errors import WeirError, brief
from vllm_weir.sae.config import TRANSCODERS, SAEConfig, chooses_k
from vllm_weir.schema.fields import is_int
from vllm_weir.schema.hooks import HEAD_HOOKS, IN_BLOCK, MODEL_HOOKS, STREAM_HOOKS, Site, parse_site

_NORMALIZED = {"ln1.hook_normalized": "attn_in", "ln2.hook_normalized": "mlp_in"}
"""Names of what a norm returns before its weight and bias -> the hook point after them."""
_BEFORE_NORM = {"hook_attn_in": ("attn_in", "resid_pre"), "hook_mlp_in": ("mlp_in", "resid_mid")}
"""Names that lie before the norm in TransformerLens, while some files mean what follows it."""
_AFTER_NORM = re.compile(r".*(layernorm|norm|ln_\d)\.output|.*(mlp|self_attn|attn)\.input")
_BLOCK = re.compile(r"blocks\.(\d{1,9})\.(\w+(?:\.\w+)?)", re.ASCII)


class NamedSite(NamedTuple):
    """A site that a file names."""

    site: Site  # the hook point of Weir
    # whether the file means the norm's output before its weight and bias, of which the site is what follows them
    before_weight: bool = False


def read_hook_name(name: object, hf_name: object, field: str, transcoder: bool = False) -> NamedSite:
    """Return the site of a hook name in a file.

    Args:
        name: e.g. ``blocks.7.hook_resid_post`` or ``blocks.7.attn.hook_z``.
        hf_name: the module of transformers that the file gives beside it, or None.
        field: named by errors.
        transcoder: whether it is the input of a transcoder; published ones mean what the norm
            returns by ``hook_mlp_in``.
    """
    block = _BLOCK.fullmatch(name) if isinstance(name, str) else None
    if block is None:
        return NamedSite(_other_site(name, field))
    layer, inner = int(block[1]), block[2]
    if inner in _NORMALIZED:
        return NamedSite(Site(_NORMALIZED[inner], layer), before_weight=True)
    if inner in _BEFORE_NORM:
        after, before = _BEFORE_NORM[inner]
        if transcoder or (isinstance(hf_name, str) and _AFTER_NORM.fullmatch(hf_name)):
            return NamedSite(Site(after, layer))
        raise WeirError(
            f"TransformerLens's {inner} is the stream before the norm ({before}), but some files mean "
            f"what the norm returns ({after}); pass site=({after!r}, {layer}) or site=({before!r}, {layer})",
            field,
        )
    return NamedSite(_other_site(name, field))


def _other_site(name: object, field: str) -> Site:
    try:
        return parse_site(name)
    except WeirError as e:
        raise WeirError(f"{brief(name, 80)!r} is no hook point ({e.message}); pass site=(hook, layer)", field) from None


def hook_name(site: Site) -> str:
    if site.hook in MODEL_HOOKS:
        return "hook_embed" if site.hook == "embed" else "ln_final.hook_out"
    names = (name for name, hook in IN_BLOCK.items() if hook == site.hook and name not in _BEFORE_NORM)
    return f"blocks.{site.layer}.{next(names, site.hook)}"


FORMAT_VERSION = "6.0.0"
"""Version of SAELens whose layout is written."""
RESIDUAL_THRESHOLD = 1e-2
"""Of matching pursuit, where the file does not say it."""
_EARLIER_NAMES = {
    "hook_point": "hook_name",
    "hook_point_layer": "hook_layer",
    "hook_point_head_index": "hook_head_index",
    "activation_fn": "activation_fn_str",
}
_BATCH_TOP_K = ("batchtopk", "matryoshka_batchtopk")
_METADATA = (
    "model_name", "hook_name", "hook_name_out", "hook_head_index", "hook_layer", "hf_hook_name", "hf_hook_name_out",
    "model_from_pretrained_kwargs", "model_class_name", "prepend_bos", "context_size", "dataset_path",
    "exclude_special_tokens", "seqpos_slice", "neuronpedia_id", "sae_lens_version", "sae_lens_training_version",
)  # fmt: skip
"""What version 6 keeps under ``metadata``, and version 5 beside the rest."""
_CHANGES_VALUES = ("fold_value_biases", "refactor_factored_attn_matrices")
"""Options of TransformerLens under which the rows of heads are others than the model's own."""


@dataclass(frozen=True)
class Given:
    """What the caller of `load` says about a file's input; see there."""

    site: object = None
    out_site: object = None
    norm_scaling_factor: float | None = None
    norm_weight: torch.Tensor | float | None = None
    norm_bias: torch.Tensor | float | None = None
    center_rows: bool | None = None


@dataclass(frozen=True)
class ParsedFile:
    """A file's entries."""

    config: SAEConfig  # of the autoencoder, before anything is folded
    folds_decoder_norms: bool = False  # whether thresholds are in units of activations times decoder norms
    scaled_features: bool = False  # whether the file has factors of the activations that are not all 1
    scaling: float = 1.0  # factor of the input
    center: bool = False  # whether the mean of each row is subtracted from it
    before_weight: bool = False  # whether rows are meant before the norm's weight and bias
    dtype: str | None = None  # of the weights, or None
    # (d_in, d_sae, d_out) as the file says them, None where it does not
    shape: tuple[int | None, int | None, int | None] = (None, None, None)


def parse_cfg(cfg: Mapping[str, Any], given: Given, name: str) -> ParsedFile:
    """Parse the content of a ``cfg.json``; raise WeirError naming the entry that is wrong or not supported."""
    entries = {_EARLIER_NAMES.get(key, key): value for key, value in cfg.items()}
    metadata = entries.pop("metadata", None) or {}
    if not isinstance(metadata, Mapping):
        raise WeirError(f"expected an object, got {type(metadata).__name__}", "metadata")
    metadata = {key: entries[key] for key in _METADATA if key in entries} | dict(metadata)
    architecture, k = _architecture(entries)
    batch_top_k, pursuit = architecture in _BATCH_TOP_K, architecture == "matching_pursuit"
    transcoder = architecture in TRANSCODERS
    named = _site(metadata, given, transcoder)
    options = metadata.get("model_from_pretrained_kwargs") or {}
    if not isinstance(options, Mapping):
        raise WeirError(f"expected an object, got {type(options).__name__}", "model_from_pretrained_kwargs")
    normalisation, scaling = _normalisation(entries, given)
    if transcoder and entries.get("normalize_activations") == "expected_average_only_in":
        raise WeirError("a factor of a transcoder's input says nothing about its output", "normalize_activations")
    config = SAEConfig(
        architecture="batchtopk" if batch_top_k else architecture,
        site=named.site,
        out_site=_out_site(metadata, given) if transcoder else None,
        head=_head(metadata, named.site, transcoder),
        apply_b_dec_to_input=_flag(entries, "apply_b_dec_to_input", default=not transcoder),
        normalize_activations=normalisation,
        k=k if chooses_k(architecture) or pursuit else 0,
        rescale_acts_by_decoder_norm=chooses_k(architecture) and _flag(entries, "rescale_acts_by_decoder_norm"),
        residual_threshold=entries.get("residual_threshold", RESIDUAL_THRESHOLD) if pursuit else 0.0,
        stop_on_duplicate_support=pursuit and _flag(entries, "stop_on_duplicate_support", default=True),
        name=name,
        metadata=metadata,
    )
    _check_reshape(entries, config)
    return ParsedFile(
        config,
        folds_decoder_norms=batch_top_k and _flag(entries, "rescale_acts_by_decoder_norm"),
        scaled_features=_flag(entries, "finetuning_scaling_factor"),
        scaling=scaling,
        center=_center(options, named.site, given),
        before_weight=_before_weight(named, options),
        dtype=entries.get("dtype"),
        shape=(_width(entries, "d_in"), _width(entries, "d_sae"), _width(entries, "d_out")),
    )


def to_cfg(config: SAEConfig, dtype: str, d_in: int, d_sae: int, d_out: int) -> dict[str, Any]:
    """Return the content of a ``cfg.json`` of version 6."""
    metadata = {key: value for key, value in config.metadata.items() if key != "hook_layer"}
    metadata |= {
        "hook_name": hook_name(config.site),
        "hook_head_index": config.head,
        "sae_lens_version": FORMAT_VERSION,
        "model_from_pretrained_kwargs": {},
    }
    metadata.pop("hf_hook_name", None)
    metadata.pop("file_format", None)  # it is SAELens's now
    cfg: dict[str, Any] = {
        "architecture": config.saved_architecture,
        "d_in": d_in,
        "d_sae": d_sae,
        "dtype": dtype,
        "device": "cpu",
        "apply_b_dec_to_input": config.apply_b_dec_to_input,
        "normalize_activations": config.normalize_activations,
        "reshape_activations": "hook_z" if config.site.hook == "z" and config.head is None else "none",
        "metadata": metadata,
    }
    if config.is_transcoder:
        assert config.out_site is not None
        cfg["d_out"] = d_out
        metadata["hook_name_out"] = hook_name(config.out_site)
    if chooses_k(config.architecture):
        cfg |= {"k": config.k, "rescale_acts_by_decoder_norm": config.rescale_acts_by_decoder_norm}
    if config.architecture == "matching_pursuit":
        cfg |= {"residual_threshold": config.residual_threshold, "max_iterations": config.k or None}
        cfg["stop_on_duplicate_support"] = config.stop_on_duplicate_support
    return cfg


def _architecture(entries: Mapping[str, Any]) -> tuple[str, int]:
    """Return the architecture, and k of a TopK SAE or the most steps of matching pursuit, 0 for d_in."""
    architecture = entries.get("architecture") or "standard"
    function = entries.get("activation_fn_str") or "relu"
    kwargs = entries.get("activation_fn_kwargs") or {}
    if not isinstance(kwargs, Mapping) or set(kwargs) - {"k"}:
        raise WeirError(f"only k is known, got {brief(kwargs)}", "activation_fn_kwargs")
    if architecture == "matching_pursuit":
        return architecture, entries.get("max_iterations") or 0
    if function == "topk" and architecture in ("standard", "topk"):
        return "topk", entries.get("k", kwargs.get("k", 0))
    if function not in ("relu", "topk") or (function == "topk" and architecture not in _BATCH_TOP_K):
        raise WeirError(
            f"{brief(function)!r} in a {brief(architecture)} SAE is not supported; ReLU and TopK are", "activation_fn"
        )
    return str(architecture), entries.get("k", kwargs.get("k", 0))


def _normalisation(entries: Mapping[str, Any], given: Given) -> tuple[str, float]:
    """Return a normalisation that depends on the row, or "none", and the factor of the input."""
    name = entries.get("normalize_activations")
    if isinstance(name, bool) or name is None:  # versions before 3
        name = "expected_average_only_in" if name else "none"
    factor = given.norm_scaling_factor
    if name != "expected_average_only_in":
        if factor is not None:
            raise WeirError(f"the file's normalize_activations is {brief(name)}; leave it out", "norm_scaling_factor")
        return name, 1.0
    if factor is None:
        raise WeirError(
            "expected_average_only_in multiplies rows by a factor that the file does not have; pass "
            "norm_scaling_factor= (sqrt(d_in) / mean norm of the training rows), or 1 if it is folded into the weights",
            "normalize_activations",
        )
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < 1e30:
        raise WeirError(f"expected a positive number, got {brief(factor)}", "norm_scaling_factor")
    return "none", float(factor)


def _site(metadata: Mapping[str, Any], given: Given, transcoder: bool) -> NamedSite:
    name = metadata.get("hook_name")
    if given.site is not None:
        normalized = isinstance(name, str) and name.endswith(".hook_normalized")
        return NamedSite(parse_site(given.site), before_weight=normalized)
    if name is None:
        raise WeirError("the file does not say which hook point it is for; pass site=(hook, layer)", "hook_name")
    named = read_hook_name(name, metadata.get("hf_hook_name"), "hook_name", transcoder)
    layer = metadata.get("hook_layer")
    if layer is not None and layer != named.site.layer:
        raise WeirError(f"it is {brief(layer)}, but hook_name is {brief(name, 80)}", "hook_layer")
    return named


def _out_site(metadata: Mapping[str, Any], given: Given) -> Site | None:
    if given.out_site is not None:
        return parse_site(given.out_site)
    name = metadata.get("hook_name_out")
    if metadata.get("hook_head_index_out") is not None:
        raise WeirError("a transcoder that writes a single head is not supported", "hook_head_index_out")
    return None if not name else read_hook_name(name, metadata.get("hf_hook_name_out"), "hook_name_out").site


def _head(metadata: Mapping[str, Any], site: Site, transcoder: bool) -> int | None:
    head = metadata.get("hook_head_index")
    if head is not None and (not is_int(head) or head < 0):
        raise WeirError(f"a head is an int from 0, got {brief(head)}", "hook_head_index")
    if head is not None and site.hook not in HEAD_HOOKS:
        raise WeirError(f"{site} has no heads", "hook_head_index")
    if head is not None and transcoder:
        raise WeirError("a transcoder that reads a single head is not supported", "hook_head_index")
    return head


def _check_reshape(entries: Mapping[str, Any], config: SAEConfig) -> None:
    reshape = entries.get("reshape_activations")
    if reshape not in (None, "none", "hook_z"):
        raise WeirError(f"{brief(reshape)!r} is not supported; none and hook_z are", "reshape_activations")
    if reshape == "hook_z" and config.site.hook != "z":
        raise WeirError(f"hook_z flattens the heads of z, and the hook point is {config.site}", "reshape_activations")


def _center(options: Mapping[str, Any], site: Site, given: Given) -> bool:
    """Return whether rows have to be centred as TransformerLens centres the stream of models with LayerNorm."""
    if site.hook in ("q", "k", "v", "z"):
        for name in _CHANGES_VALUES:
            if options.get(name):
                raise WeirError(
                    f"the rows that it was trained on are not the model's own, since TransformerLens changed {site}",
                    f"model_from_pretrained_kwargs.{name}",
                )
    if given.center_rows is not None:
        return bool(given.center_rows)
    if options.get("center_writing_weights") and site.hook in (*STREAM_HOOKS, "embed"):
        raise WeirError(
            "TransformerLens then subtracts each row's mean, in models with LayerNorm only; pass center_rows=True for "
            "a model with LayerNorm (such as GPT-2), False for one with RMSNorm",
            "model_from_pretrained_kwargs.center_writing_weights",
        )
    return False


def _before_weight(named: NamedSite, options: Mapping[str, Any]) -> bool:
    folded = bool(options.get("fold_ln")) and named.site.hook in ("attn_in", "mlp_in")
    return named.before_weight or folded


def _flag(entries: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = entries.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise WeirError(f"true or false, got {brief(value)}", name)
    return value


def _width(entries: Mapping[str, Any], name: str) -> int | None:
    value = entries.get(name)
    if value is not None and not (is_int(value) and value > 0):
        raise WeirError(f"expected a positive int, got {brief(value)}", name)
    return value
