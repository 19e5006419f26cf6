"""Reading and writing the files of sparse autoencoders. Nothing in them is executed."""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from vllm_weir.errors import MissingFile, StoreError, WeirError
from vllm_weir.sae import cross_layer, cross_layer_files
from vllm_weir.sae import tensors as folding
from vllm_weir.sae.config import ROW_NORMALISATIONS, SAEConfig
from vllm_weir.sae.cross_layer_files import CrossLayerFormat
from vllm_weir.sae.published import FORMATS, Entries, Format, format_of, read_json, read_safetensors
from vllm_weir.sae.saelens import Given, ParsedFile, parse_cfg, to_cfg
from vllm_weir.schema.hooks import parse_site
from vllm_weir.util.atomic_write import atomic_write
from vllm_weir.util.foreign_files import damage_refused, npz_arrays, open_regular

CFG, WEIGHTS, SCALER, PARAMS = "cfg.json", "sae_weights.safetensors", "activation_scaler.json", "params.npz"
CONFIG = "config.yaml"
"""Of circuit-tracer."""
LABELS = "labels.json"
"""{feature: text}: what features stand for; a file of Weir's."""

Loaded = tuple[SAEConfig, dict[str, torch.Tensor]]


def load(path: Path, given: Given, name: str) -> tuple[SAEConfig, dict[str, torch.Tensor], str | None]:
    """Return the autoencoder of a path with everything folded, and the dtype that its file wants, if it says one.

    Raises WeirError for files that are missing, damaged or of another format, and for what they ask that is not done.
    """
    if (published := cross_layer_files.format_of(path)) is not None:
        return (*_load_cross_layer(path, published, given, name), None)
    file, read = _read(path, given, name)
    return (*_fold(file, read, given), file.dtype)


def _load_cross_layer(path: Path, published: CrossLayerFormat, given: Given, name: str) -> Loaded:
    """Return a cross-layer transcoder, each block of which is read and folded as a transcoder alone is."""
    read = published.read(path)
    site, out_site = (None if one is None else parse_site(one) for one in (given.site, given.out_site))
    if any(one is not None and one.layer != 0 for one in (site, out_site)):
        raise WeirError("its first block is 0: give (hook, 0)", "site")
    configs, blocks = [], []
    for layer, (entries, tensors) in enumerate(read):
        own = replace(
            given,
            site=None if site is None else site._replace(layer=layer),
            out_site=None if out_site is None else out_site._replace(layer=layer),
            norm_weight=_of_block(given.norm_weight, layer, len(read), "norm_weight"),
            norm_bias=_of_block(given.norm_bias, layer, len(read), "norm_bias"),
        )
        file = _parsed(published.name, entries, own, name or path.resolve().name)
        file = replace(file, config=replace(file.config, writes=len(read) - layer))
        config, folded = _fold(file, tensors, own)
        configs.append(config)
        blocks.append((layer, folded))
    return replace(configs[0], writes=0, layers=tuple(range(len(read)))), cross_layer.joined(blocks)


def _of_block(value: Any, layer: int, count: int, name: str) -> Any:
    if value is None or isinstance(value, (int, float)):
        return value
    values = folding.as_tensor(value, name)
    if values.ndim != 2 or len(values) != count:
        raise WeirError(f"expected [{count} blocks, d_in], got shape {list(values.shape)}", name)
    return values[layer]


def _read(path: Path, given: Given, name: str) -> tuple[ParsedFile, dict[str, torch.Tensor]]:
    """Read the files of an autoencoder: of SAELens, Gemma Scope's ``params.npz``, or another published format.

    Tensors of a safetensors file are mapped from it and read when they are used.
    """
    if (published := format_of(path)) is not None:
        return _read_published(path, published, given, name)
    if path.is_dir() and (path / CFG).exists():
        return _read_saelens(path, given, name)
    params = path / PARAMS if path.is_dir() else path
    if not path.exists():
        raise MissingFile(f"{path} does not exist", "path")
    if not params.exists():
        raise MissingFile(f"{path} has neither {CFG} nor {PARAMS}, nor files of {_known()}", "path")
    if params.suffix != ".npz":
        raise WeirError(
            f"expected a directory of SAELens, a file .npz, or files of {_known()}, got {params.name}", "path"
        )
    return _read_gemma_scope(params, given, name)


def _fold(file: ParsedFile, tensors: dict[str, torch.Tensor], given: Given) -> Loaded:
    """Return the autoencoder of a file with everything folded that is a linear function of the input."""
    _take_scaling_factors(file, tensors)
    if "topk_threshold" in tensors and file.config.architecture == "batchtopk":
        threshold = tensors.pop("topk_threshold").float()
        tensors["threshold"] = threshold.expand(tensors["W_enc"].shape[-1]).contiguous()
    folding.check_tensors(file.config, tensors)
    _check_shape(file, tensors)
    if file.config.architecture == "matching_pursuit":
        return _not_folded(file, given), tensors
    if file.folds_decoder_norms:
        folding.scale_by_decoder_norms(tensors)
    folding.scale_input(tensors, file.scaling)
    return _fold_input(file, tensors, given), tensors


def _not_folded(file: ParsedFile, given: Given) -> SAEConfig:
    """Return the config of matching pursuit, whose encoder is its decoder; raise WeirError if something is to fold."""
    weight = given.norm_weight
    asked = {
        "norm_scaling_factor": file.scaling != 1,
        "center_rows": file.center,
        "norm_weight": file.before_weight if weight is None else bool((torch.as_tensor(weight) != 1).any()),
        "norm_bias": given.norm_bias is not None,
    }
    if wrong := next((name for name, is_asked in asked.items() if is_asked), None):
        raise WeirError("matching pursuit encodes with its decoder, so nothing of the input can be folded in", wrong)
    return file.config


def write(path: Path, config: SAEConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Write a directory in the layout of SAELens 6; files of the same names are replaced.

    A cross-layer transcoder is written in circuit-tracer's.
    """
    if config.writes:
        raise WeirError("one block of a cross-layer transcoder is saved with all others: save that", "path")
    weights = cross_layer_files.as_files(config, tensors) if config.layers else {WEIGHTS: tensors}
    texts = {CONFIG: cross_layer_files.config_yaml(config)} if config.layers else _texts(config, tensors)
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name, content in weights.items():
            _write_weights(path / name, folding.for_file(content))
        for name, text in texts.items():
            if not text:
                (path / name).unlink(missing_ok=True)
                continue
            with atomic_write(path / name) as file:
                file.write(text.encode())
    except (OSError, SafetensorError) as e:
        raise StoreError(f"cannot write {path} ({str(e)[:80]})", "path") from None


def _texts(config: SAEConfig, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    decoder = tensors["W_dec"]
    d_in = tensors.get("W_enc", decoder.T).shape[0]
    cfg = to_cfg(config, str(decoder.dtype).removeprefix("torch."), d_in, *decoder.shape)
    contents = ((CFG, cfg), (LABELS, config.labels))
    return {name: json.dumps(content, indent=2) + "\n" if content else "" for name, content in contents}


def _write_weights(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file beside `path` and rename it to `path`, which others may have mapped."""
    temporary = path.with_name(f".weir-{secrets.token_hex(8)}.tmp")
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        save_file(tensors, temporary)  # gives the file to its owner alone
        temporary.chmod(mode)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read_saelens(path: Path, given: Given, name: str) -> tuple[ParsedFile, dict[str, torch.Tensor]]:
    cfg = read_json(path / CFG)
    if given.norm_scaling_factor is None and (path / SCALER).exists():
        scaler = read_json(path / SCALER)
        if scaler.get("has_whitening"):
            raise WeirError("whitened activations are not supported", f"{SCALER}.has_whitening")
        if cfg.get("normalize_activations") == "expected_average_only_in":
            given = replace(given, norm_scaling_factor=scaler.get("scaling_factor"))
    file = parse_cfg(cfg, given, name or path.resolve().name)
    if (path / LABELS).exists():
        labels: Any = read_json(path / LABELS)  # with features as text, which the config takes, too
        file = replace(file, config=replace(file.config, labels=labels))
    return file, read_safetensors(path / WEIGHTS)


def _known() -> str:
    return ", ".join(one.name for one in FORMATS)


def _read_published(
    path: Path, published: Format, given: Given, name: str
) -> tuple[ParsedFile, dict[str, torch.Tensor]]:
    entries, tensors = published.read(path)
    return _parsed(published.name, entries, given, name or path.resolve().stem), tensors


def _parsed(file_format: str, entries: Entries, given: Given, name: str) -> ParsedFile:
    """Parse what a reader of another project's files returns as entries of a ``cfg.json``."""
    factor = entries.pop("own_scaling_factor", None)
    if given.norm_scaling_factor is None and factor is not None:
        given = replace(given, norm_scaling_factor=factor)
    metadata = {"file_format": file_format} | ({"model_name": entries.pop("model_name", None) or ""})
    metadata |= {key: entries.pop(key) for key in ("hook_name", "hook_name_out") if key in entries}
    return parse_cfg(entries | {"metadata": metadata}, given, name)


def _read_gemma_scope(path: Path, given: Given, name: str) -> tuple[ParsedFile, dict[str, torch.Tensor]]:
    if given.site is None:
        raise WeirError(
            "Gemma Scope's files do not say which hook point they are for; pass site=(hook, layer), such as "
            '("resid_post", 20), or ("mlp_in", 20) for a transcoder',
            "site",
        )
    site = parse_site(given.site)
    if given.norm_scaling_factor is not None:
        raise WeirError("Gemma Scope's weights have the factor folded in; leave it out", "norm_scaling_factor")
    out_site = None if given.out_site is None else parse_site(given.out_site)
    transcoder = site.hook == "mlp_in" or out_site not in (None, site)
    config = SAEConfig(
        "jumprelu_transcoder" if transcoder else "jumprelu",
        site,
        out_site,
        name=name or path.resolve().parent.name,
        metadata={"file_format": "gemma_scope"},
    )
    with open_regular(path) as opened:
        head = opened.read(1024)
        with damage_refused("truncated, damaged or no .npz file of numbers", path.name, head):
            arrays, _ = npz_arrays(opened)
    tensors = {key: folding.as_tensor(array, key) for key, array in arrays.items()}
    # Its transcoders read what the norm returns before its weight.
    return ParsedFile(config, center=bool(given.center_rows), before_weight=site.hook == "mlp_in"), tensors


def _take_scaling_factors(file: ParsedFile, tensors: dict[str, torch.Tensor]) -> None:
    """Fold the factors of fine-tuning into the decoder and remove them."""
    for name in ("scaling_factor", "finetuning_scaling_factor"):
        factors = tensors.pop(name, None)
        if factors is None or bool((factors == 1).all()):
            continue
        if not file.scaled_features:
            raise WeirError(
                f"there are factors in {name}, which this entry does not ask for", "finetuning_scaling_factor"
            )
        if tuple(factors.shape) != tuple(tensors["W_dec"].shape[:1]):
            raise WeirError(f"expected one factor for each feature, got {list(factors.shape)}", name)
        folding.scale_features(tensors, factors)


def _check_shape(file: ParsedFile, tensors: dict[str, torch.Tensor]) -> None:
    decoder = tensors["W_dec"]
    encoder = tensors.get("W_enc", decoder if decoder.ndim != 2 else decoder.T)
    found = (*encoder.shape, decoder.shape[-1])
    for name, said, width in zip(("d_in", "d_sae", "d_out"), file.shape, found, strict=True):
        if said is not None and said != width:
            raise WeirError(f"it says {said}, but the weights have {width}", name)


def _fold_input(file: ParsedFile, tensors: dict[str, torch.Tensor], given: Given) -> SAEConfig:
    """Fold what lies between the rows of Weir and those that the file means; return the config that is left."""
    config = file.config
    weight, bias = _norm(file, tensors, given)
    if weight is None and not file.center:
        return config
    if config.normalize_activations in ROW_NORMALISATIONS:
        raise WeirError(
            f"{config.normalize_activations} of rows that are not the hook point's own is not supported",
            "normalize_activations",
        )
    if config.apply_b_dec_to_input:
        folding.subtract_b_dec_in_encoder(tensors)
    if file.center:  # of what the file means, so before it is expressed by the rows of Weir
        folding.centre_input(tensors)
    if weight is not None:
        folding.divide_input(tensors, weight)
        if bias is not None:
            folding.shift_input(tensors, -bias.double())
        if not config.is_transcoder:
            return _fold_output(config, tensors, weight, bias)
    return replace(config, apply_b_dec_to_input=False)


def _fold_output(
    config: SAEConfig, tensors: dict[str, torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None
) -> SAEConfig:
    """Fold the norm into the decoder of an autoencoder, which reconstructs what it reads; return the config."""
    if config.rescale_acts_by_decoder_norm:  # by the norms that the file's decoder has
        folding.scale_by_decoder_norms(tensors)
    folding.multiply_output(tensors, weight, bias)
    return replace(config, apply_b_dec_to_input=False, rescale_acts_by_decoder_norm=False)


def _norm(
    file: ParsedFile, tensors: dict[str, torch.Tensor], given: Given
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the weight and bias of the norm that the file's rows lack, if they do."""
    d_in = tensors["W_enc"].shape[0]
    if given.norm_weight is None:
        if file.before_weight:
            raise WeirError(
                f"it reads what the norm returns before its weight and bias, {file.config.site} is after them: pass "
                "norm_weight= (1 + weight in Gemma) and norm_bias=, or norm_weight=1 if it was trained after them; "
                "where only a path can be given, give what SAE.load(path, norm_weight=...).save(directory) writes",
                "norm_weight",
            )
        if given.norm_bias is not None:
            raise WeirError("norm_bias comes with norm_weight", "norm_bias")
        return None, None
    weight, bias = _vector(given.norm_weight, d_in, "norm_weight"), _vector(given.norm_bias, d_in, "norm_bias")
    assert weight is not None
    if not bool((weight != 0).all()):
        raise WeirError("a weight of 0 cannot be divided out", "norm_weight")
    return (None if bool((weight == 1).all()) and bias is None else weight), bias


def _vector(value: Any, width: int, name: str) -> torch.Tensor | None:
    if value is None:
        return None
    vector = folding.as_tensor(value, name).detach().to("cpu", torch.float32)
    if vector.ndim == 0:
        vector = vector.expand(width)
    if tuple(vector.shape) != (width,) or not bool(torch.isfinite(vector).all()):
        raise WeirError(f"expected {width} finite numbers, got shape {list(vector.shape)}", name)
    return vector
