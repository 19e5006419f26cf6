"""`SAEInfo`: what is told of a loaded sparse autoencoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from vllm_weir.schema.hooks import Site


class SAEInfo(NamedTuple):
    """A sparse autoencoder that an engine has loaded.

    Attributes:
        name: under which requests name it.
        site: the hook point that it reads.
        d_sae: its features.
        architecture: SAELens's name of it.
        bytes: of its weights, on each worker.
        labels: what features stand for, {feature: text}.
        layers: blocks of a cross-layer transcoder, each with `d_sae` features, `site` being that of the
            first; empty for everything else.
    """

    name: str
    site: Site
    d_sae: int
    architecture: str
    bytes: int
    labels: Mapping[int, str] = {}
    layers: tuple[int, ...] = ()
