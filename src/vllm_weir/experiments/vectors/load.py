"""`load_vector`: directions from the files of llama.cpp, repeng, steering-vectors, SAELens, pyreft and Weir."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.experiments.directions import Directions
from vllm_weir.experiments.vectors import reft
from vllm_weir.experiments.vectors.codec import Found, Given, described
from vllm_weir.experiments.vectors.named import CONVENTION, from_names, from_rows, read_torch
from vllm_weir.schema.gguf import read_gguf
from vllm_weir.schema.vector_files import METADATA, is_safetensors, kind_of, read_safetensors, read_vectors
from vllm_weir.util.foreign_files import damage_refused, npy_array, npz_arrays, open_archive, read_regular

MODEL_HINT = b"controlvector.model_hint"
_ZIP, _NPY, _PICKLE = b"PK\x03\x04", b"\x93NUMPY", b"\x80"
_DAMAGED = "damaged, or holds objects, which would have to run code"


def load_vector(
    path: str | os.PathLike,
    *,
    layers: Any = None,
    hook: str | None = None,
    numbering: str | None = None,
    feature: int | None = None,
) -> Directions:
    """Read directions from a file or folder, whatever wrote it; no code of it runs.

    It reads GGUF control vectors (llama.cpp, repeng), safetensors (Weir's, and arrays whose names
    say their blocks), ``.npz`` and ``.npy``, files of ``torch.save`` (tensors, objects of
    steering-vectors and repeng), features of SAELens and Gemma Scope, and pyreft's LobiReFT. The
    content decides which it is, not the name. `Directions.convention` says how its layers were read.

    Args:
        path: of the file; a folder for SAELens and pyreft.
        layers: block of the vector, or of each row, in files that do not say it.
        hook: hook point, in files that do not say it; ``"resid_post"`` if left out.
        numbering: how layers are counted, in files that do not say it: ``"blocks"``, from 0, or
            ``"hidden_states"``, of which number N leaves block N - 1. With the latter a file of rows alone,
            [blocks + 1, d] as persona_vectors writes it, needs no `layers`; the embedding's row is left out.
        feature: of a sparse autoencoder, the feature whose row of the decoder is read.

    Raises:
        WeirError: for what is damaged, ambiguous or no direction, naming the entry; StoreError if
            it cannot be read.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise WeirError(f"expected the path of a file or folder, got {type(path).__name__}", "path")
    given, place = Given(layers, hook, numbering), Path(path)
    if feature is not None:
        found = _feature(place, feature, given)
    elif place.is_dir():
        found = _folder(place, given)
    else:
        found = _file(place, given)
    return Directions(**vars(found))


def _folder(path: Path, given: Given) -> Found:
    if reft.is_folder(path):
        return reft.read_vectors(path, given)
    if (path / "cfg.json").exists() or (path / "params.npz").exists():
        raise WeirError("a sparse autoencoder has a vector for each feature; give feature=", "feature")
    raise WeirError("expected a file, or a folder of SAELens, Gemma Scope or pyreft", "path")


def _file(path: Path, given: Given) -> Found:
    data = read_regular(path)
    if is_safetensors(data):  # first: the length with which it begins may look like anything
        return _safetensors(data, given)
    if data[:4] == _ZIP:
        return _npz(data, given) if _is_npz(data) else read_torch(path, given)
    if data[: len(_NPY)] == _NPY:
        with damage_refused(_DAMAGED, "file"):
            array = npy_array(io.BytesIO(data))
        return from_rows([array], given, "npy")
    if data[:1] == _PICKLE:
        raise WeirError(
            "a pickle, or written by torch before 1.6: to read it would run code, or take the memory, that it names; "
            "save it in its own library with torch.save, as tensors, or as GGUF",
            "file",
        )
    readers = {"gguf": _gguf, "json": _json, "safetensors": _safetensors}
    return readers[kind_of(data)](data, given)


def _gguf(data: bytes, given: Given) -> Found:
    given.refuse_layers("GGUF")
    hook = given.hook_or("resid_post", "resid_post", "GGUF")
    vectors = {layer or 0: vector for layer, vector in read_vectors(data, "gguf", "file").items()}
    metadata = read_gguf(data, "file").metadata
    text, hint = metadata.get(METADATA.encode()), metadata.get(MODEL_HINT)
    if isinstance(text, bytes):
        return _own(vectors, text, given)
    details = {"model_type": hint.decode(errors="replace")} if isinstance(hint, bytes) else {}
    return Found(hook, vectors, "gguf", CONVENTION, details)


def _safetensors(data: bytes, given: Given) -> Found:
    tensors, metadata = read_safetensors(data, "file")
    if METADATA in metadata:
        given.refuse_layers("the file")
        found = from_names(tensors, Given(), "weir", "file")
        return _own(dict(found.vectors), metadata[METADATA], given)
    return from_names(tensors, given, "safetensors", "file")


def _own(vectors: dict[int, Any], text: str | bytes, given: Given) -> Found:
    known = {"method": "unknown", "convention": "", **described(text, f"file.{METADATA}")}
    hook = given.hook_or(str(known.pop("hook", "resid_post")), "resid_post", "the file")
    return Found(hook, vectors, **known)


def _json(data: bytes, given: Given) -> Found:
    read = read_vectors(data, "json", "file")
    if None in read:
        return from_rows([read[None]], given, "json", "file")
    return from_names({str(layer): vector for layer, vector in read.items()}, given, "json", "file")


def _npz(data: bytes, given: Given) -> Found:
    with damage_refused(_DAMAGED, "file"):
        arrays, _ = npz_arrays(io.BytesIO(data))
    return from_names(arrays, given, "npz", "file")


def _is_npz(data: bytes) -> bool:
    with damage_refused(_DAMAGED, "file"), open_archive(io.BytesIO(data)) as archive:
        names = archive.namelist()
    return bool(names) and all(name.endswith(".npy") for name in names)


def _feature(path: Path, feature: int, given: Given) -> Found:
    """Read one row of the decoder of a sparse autoencoder."""
    from vllm_weir.sae.autoencoder import SAE

    if given.numbering is not None:
        raise WeirError("the file of an autoencoder names its hook point; leave it out", "numbering")
    if (given.hook is None) != (given.layers is None) or (given.layers is not None and len(given.layers) != 1):
        raise WeirError("to say where an autoencoder reads, give hook= and one block in layers=", "layers")
    gemma_scope = path.suffix == ".npz" or ((path / "params.npz").exists() and not (path / "cfg.json").exists())
    if given.layers is None and gemma_scope:
        raise WeirError("Gemma Scope's files do not say where they read; give hook= and one block in layers=", "layers")
    site = None if given.layers is None else (given.hook, given.layers[0])
    # Only the encoder of Gemma Scope's transcoders depends on the norm's weight.
    sae = SAE.load(path, site=site, norm_weight=1 if gemma_scope else None)
    if sae.head is not None:
        raise WeirError(f"it reads head {sae.head} alone, so its rows are of one head; use weir.SetFeature", "feature")
    out, direction = sae.out_site, sae.decoder_direction(feature)
    text = (
        f"{sae.name or 'autoencoder'}: one unit of feature {int(feature)} adds this row of W_dec, in the units of the "
        f"model's rows, at {out.hook} of block {out.layer}, counted from 0: {out}."
    )
    details = {"sae": sae.name, "architecture": sae.architecture, "feature": int(feature)}
    return Found(out.hook, {out.layer: direction}, "sae", text, details)
