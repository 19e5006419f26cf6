"""The features and the lens of a request, resolved against its engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.reachable import Vocabulary, resolve_tokens
from vllm_weir.frontend.admission.sae_registry import LoadedSAE
from vllm_weir.lenses.files import open_lens, told_layers
from vllm_weir.sae.autoencoder import SAE
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.features import Features, Lens
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.read_outs import FEATURES, LENS, ReadOut

FindSAE = Callable[[str, str], LoadedSAE]
"""(name, field) -> the autoencoder under a name, or raises WeirError."""
FindLens = Callable[[str, str], str]
"""(name, field) -> the path of the lens under a name, or raises WeirError."""


@dataclass(frozen=True)
class AskedReadOut:
    """A read-out of a request.

    Attributes:
        name: the autoencoder's, or the label of a lens.
        path: names it in errors.
        sae: its autoencoder in this process; None for a lens.
        by_layer: whether it is of one block of several under its name, those of a cross-layer transcoder.
    """

    name: str
    read_out: ReadOut
    positions: Positions
    path: str
    sae: SAE | None = None
    by_layer: bool = False

    @property
    def source(self) -> Capture:
        """The capture of the rows that are read."""
        site = self.read_out.site
        return Capture(site.hook, site.layer, self.positions, path=self.path)


def read_outs_of(
    features: Sequence[Features],
    lenses: Sequence[Lens],
    capabilities: EngineCapabilities,
    find: FindSAE,
    find_lens: FindLens,
    vocabulary: Vocabulary,
) -> tuple[AskedReadOut, ...]:
    """Return the read-outs of a request; raise WeirError naming the field, for what cannot be read."""
    found = [read_out for one in features for read_out in _features(one, find, vocabulary)]
    for lens in lenses:
        found += _lens(lens, capabilities, find_lens, vocabulary)
    return tuple(found)


def read_late(asked: Sequence[AskedReadOut], capabilities: EngineCapabilities, alone: bool) -> tuple[AskedReadOut, ...]:
    """Return those that this process reads off rows; workers read the others.

    These are the features, if rows come back anyway, or if tensor-parallel workers have the rows of one in parts. Only
    workers have the unembedding that a lens needs.

    Args:
        asked: the read-outs of a request.
        capabilities: what the engine serves.
        alone: whether the request wants no rows.
    """
    features = tuple(one for one in asked if one.sae is not None)
    in_parts = any(len(capabilities.shards.get(one.read_out.site, ())) > 1 for one in features)
    return () if alone and not in_parts else features


def _features(asked: Features, find: FindSAE, vocabulary: Vocabulary) -> list[AskedReadOut]:
    loaded = find(asked.name, f"{asked.path}.name")
    d_sae, layers = loaded.sae.d_sae, loaded.sae.layers or (loaded.sae.site.layer,)
    if asked.top_k is not None and asked.top_k > d_sae:
        raise WeirError(f"{asked.name!r} has {d_sae} features; ask for as many at most", f"{asked.path}.top_k")
    ids = asked.ids or ()
    if ids and max(ids) >= d_sae:
        raise WeirError(f"features of {asked.name!r} count from 0 to {d_sae - 1}", f"{asked.path}.ids")
    positions, found = _positions(asked.positions, asked.path, vocabulary), []
    for layer in layers if asked.layers == "all" else asked.layers:
        sae, key = loaded.block(layer, f"{asked.path}.layers")
        read_out = ReadOut(FEATURES, sae.site, key, 0 if ids else asked.top_k or 0, tuple(ids))
        found.append(AskedReadOut(asked.name, read_out, positions, asked.path, sae, bool(loaded.sae.layers)))
    return found


def _lens(asked: Lens, capabilities: EngineCapabilities, find: FindLens, vocabulary: Vocabulary) -> list[AskedReadOut]:
    if capabilities.no_lens:
        raise WeirError(capabilities.no_lens, asked.at)
    if vocabulary.size and (asked.top_k or 0) > vocabulary.size:
        raise WeirError(f"the model has {vocabulary.size} tokens; ask for as many at most", f"{asked.at}.top_k")
    if vocabulary.size and max(asked.tokens or (0,)) >= vocabulary.size:
        raise WeirError(f"token ids count from 0 to {vocabulary.size - 1}", f"{asked.at}.tokens")
    positions = _positions(asked.positions, asked.at, vocabulary)
    layers = Capture(asked.hook, asked.layers, path=asked.at).resolve_layers(capabilities.num_layers)
    path = _lens_path(asked, capabilities, find, layers)
    read_outs = (ReadOut(LENS, Site(asked.hook, layer), path, asked.top_k or 0, asked.tokens or ()) for layer in layers)
    return [AskedReadOut(asked.label, one, positions, asked.at) for one in read_outs]


def _lens_path(asked: Lens, capabilities: EngineCapabilities, find: FindLens, layers: Sequence[int]) -> str:
    """Return the path of a fitted lens, "" for the logit lens; raise WeirError if it does not serve these blocks."""
    if asked.kind == "logit":
        return ""
    field = f"{asked.at}.{'path' if asked.name is None else 'name'}"
    path = asked.path if asked.name is None else find(asked.name, field)
    lens = open_lens(path, field)
    if asked.kind not in (None, lens.kind):
        raise WeirError(f"it is a {lens.kind} lens, not a {asked.kind} one", field)
    lens.check_fits(capabilities.num_layers, capabilities.d_model, field)
    last = capabilities.num_layers - 1
    lacking = [layer for layer in layers if layer != last and layer not in lens.layers]
    if lacking:
        raise WeirError(
            f"the lens has no matrix for block {lacking[0]}; ask for {told_layers(lens.layers)}, or for block {last}, "
            "which needs none",
            f"{asked.at}.layers",
        )
    return str(path)


def _positions(positions: Positions, path: str, vocabulary: Vocabulary) -> Positions:
    """Return a selector with its tokens resolved."""
    return resolve_tokens(Capture("resid_post", 0, positions, path=path), vocabulary).positions
