"""`FeatureSpec`: the features that a run extracts in place of rows; can be pickled."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_weir.errors import WeirError, brief
from vllm_weir.sae.autoencoder import SAE
from vllm_weir.sae.config import NamedPath
from vllm_weir.sae.saelens import to_cfg
from vllm_weir.sae.transfer import digest_of
from vllm_weir.schema.features import Features
from vllm_weir.schema.hooks import Site
from vllm_weir.storage.features.dataset import FeatureInfo

DEFAULT_TOP_K = 32


@dataclass(frozen=True)
class FeatureSpec:
    """Features of an autoencoder at the positions of a run. Made by `parse`."""

    info: FeatureInfo  # what is written beside the features
    source: SAE | NamedPath = field(compare=False)  # the autoencoder, or how each worker loads it
    asked: Features  # the features that each request asks for; its positions are those of the run

    @classmethod
    def parse(cls, sae: Any, top_k: Any, ids: Any, model: str, positions: Any) -> FeatureSpec:
        """Load an autoencoder and check what is asked of it, as for `extract`; raise WeirError naming the option."""
        source = _source(sae)
        with_weights = load_source(source)
        if with_weights.layers:
            raise WeirError(
                "a cross-layer transcoder has features at several blocks; give one of them, "
                "weir.SAE.load(path).block(layer)",
                "sae",
            )
        name = source.name or os.path.basename(os.path.normpath(with_weights.name)) or "sae"
        d_sae = with_weights.d_sae
        if top_k is None and ids is None:
            top_k = min(DEFAULT_TOP_K, d_sae)
        try:
            asked = Features(name, top_k, ids, positions, path="")
        except WeirError as e:
            option = e.field.lstrip(".")
            raise WeirError(e.message, "sae" if option == "name" else option) from None
        if asked.top_k is not None and asked.top_k > d_sae:
            raise WeirError(f"{name!r} has {d_sae} features, got {asked.top_k}", "top_k")
        if asked.ids is not None and max(asked.ids) >= d_sae:
            raise WeirError(f"{name!r} has features 0 to {d_sae - 1}, got {max(asked.ids)}", "ids")
        dtype = str(with_weights.dtype).removeprefix("torch.")
        cfg = to_cfg(with_weights.config, dtype, with_weights.d_in, d_sae, with_weights.d_out)
        info = FeatureInfo(
            name, with_weights.site, d_sae, cfg, digest_of(with_weights), model, asked.top_k, asked.ids
        )  # fmt: skip
        return cls(info, source, asked)

    @property
    def site(self) -> Site:
        return self.info.site

    def load(self) -> SAE:
        """Load the autoencoder; raise WeirError if it is no longer the one that was checked."""
        sae = load_source(self.source)
        if isinstance(self.source, NamedPath) and digest_of(sae) != self.info.digest:
            raise WeirError(f"{self.source.path} has changed since the run began", "sae")
        return sae

    def identity(self) -> dict[str, Any]:
        """Return what determines the features, as plain JSON data."""
        info = self.info
        return {
            "sae": {"name": info.sae, "digest": info.digest}, "top_k": info.top_k,
            "ids": None if info.ids is None else list(info.ids),
        }  # fmt: skip


def load_source(source: SAE | NamedPath) -> SAE:
    if isinstance(source, SAE):
        return source
    try:
        return SAE.load(source.path, site=source.site, name=source.name)
    except WeirError as e:
        raise WeirError(f"{source.path}: {e}", "sae") from None


def _source(sae: Any) -> SAE | NamedPath:
    """Return the autoencoder or its path, under the name that is given with it."""
    if isinstance(sae, SAE):
        return sae
    if isinstance(sae, NamedPath):
        return sae
    if isinstance(sae, str) and "=" in sae:
        return NamedPath.parse(sae, "sae")
    if isinstance(sae, (str, os.PathLike)):
        return NamedPath("", os.fspath(sae))
    if isinstance(sae, Mapping):
        if len(sae) != 1:
            raise WeirError(f"a run extracts the features of one autoencoder, got {len(sae)}; run once for each", "sae")
        ((name, one),) = sae.items()
        if not isinstance(name, str) or not name:
            raise WeirError(f"an autoencoder's name is a text, got {brief(name)!r}", "sae")
        if isinstance(one, SAE):
            return one.renamed(name)
        if isinstance(one, (str, os.PathLike)):
            return NamedPath(name, os.fspath(one))
        sae = one
    raise WeirError(f"expected an SAE, the path of one, or {{name: either}}, got {type(sae).__name__}", "sae")
