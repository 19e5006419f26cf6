"""The features and the lens of a request, resolved against its engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.reachable import Vocabulary, resolve_tokens
from vllm_weir.frontend.admission.sae_registry import LoadedSAE
from vllm_weir.sae.autoencoder import SAE
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.features import Features, Lens
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.read_outs import FEATURES, LENS, ReadOut
from vllm_weir.worker.lenses import check_tuned_lens

FindSAE = Callable[[str, str], LoadedSAE]
"""(name, field) -> the autoencoder under a name, or raises WeirError."""


@dataclass(frozen=True)
class AskedReadOut:
    """A read-out of a request.

    Attributes:
        name: the autoencoder's, or the block of a lens.
        path: names it in errors.
        sae: its autoencoder in this process; None for a lens.
    """

    name: str | int
    read_out: ReadOut
    positions: Positions
    path: str
    sae: SAE | None = None

    @property
    def source(self) -> Capture:
        """The capture of the rows that are read."""
        site = self.read_out.site
        return Capture(site.hook, site.layer, self.positions, path=self.path)


def read_outs_of(
    features: Sequence[Features],
    lens: Lens | None,
    capabilities: EngineCapabilities,
    find: FindSAE,
    vocabulary: Vocabulary,
) -> tuple[AskedReadOut, ...]:
    """Return the read-outs of a request; raise WeirError naming the field, for what cannot be read."""
    found = [_features(one, find, vocabulary) for one in features]
    if lens is not None:
        found += _lens(lens, capabilities, vocabulary)
    return tuple(found)


def on_device(asked: Sequence[AskedReadOut], capabilities: EngineCapabilities, alone: bool) -> bool:
    """Return whether workers read these off the rows; else this process does it.

    `alone`: whether the request wants no rows.

    Raises:
        WeirError: naming the field, for a lens that would have to be read in this process, which
            has no unembedding.
    """
    if alone and not any(len(capabilities.shards.get(one.read_out.site, ())) > 1 for one in asked):
        return True
    lens = next((one for one in asked if one.sae is None), None)
    if lens is not None:
        why = "the request, or a sink of the engine for all requests, captures rows"
        if alone:
            why = "tensor-parallel workers hold the rows of its features in parts"
        raise WeirError(f"{why}, and a lens is read on the workers; send a request with the lens alone", lens.path)
    return False


def _features(asked: Features, find: FindSAE, vocabulary: Vocabulary) -> AskedReadOut:
    loaded = find(asked.name, f"{asked.path}.name")
    sae = loaded.sae
    if asked.top_k is not None and asked.top_k > sae.d_sae:
        raise WeirError(f"{asked.name!r} has {sae.d_sae} features; ask for as many at most", f"{asked.path}.top_k")
    ids = asked.ids or ()
    if ids and max(ids) >= sae.d_sae:
        raise WeirError(f"features of {asked.name!r} count from 0 to {sae.d_sae - 1}", f"{asked.path}.ids")
    read_out = ReadOut(FEATURES, sae.site, loaded.key, 0 if ids else asked.top_k or 0, tuple(ids))
    return AskedReadOut(asked.name, read_out, _positions(asked.positions, asked.path, vocabulary), asked.path, sae)


def _lens(asked: Lens, capabilities: EngineCapabilities, vocabulary: Vocabulary) -> list[AskedReadOut]:
    if capabilities.no_lens:
        raise WeirError(capabilities.no_lens, asked.at)
    if vocabulary.size and asked.top_k > vocabulary.size:
        raise WeirError(f"the model has {vocabulary.size} tokens; ask for as many at most", f"{asked.at}.top_k")
    if asked.path is not None:
        check_tuned_lens(Path(asked.path), capabilities.num_layers, capabilities.d_model, f"{asked.at}.path")
    positions = _positions(asked.positions, asked.at, vocabulary)
    layers = Capture("resid_post", asked.layers, path=asked.at).resolve_layers(capabilities.num_layers)
    return [
        AskedReadOut(
            layer,
            ReadOut(LENS, Site("resid_post", layer), asked.path or "", asked.top_k),
            positions,
            asked.at,
        )
        for layer in layers
    ]


def _positions(positions: Positions, path: str, vocabulary: Vocabulary) -> Positions:
    """Return a selector with its tokens resolved."""
    return resolve_tokens(Capture("resid_post", 0, positions, path=path), vocabulary).positions
