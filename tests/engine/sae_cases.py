"""Autoencoders and transcoders of the tiny model, and the references of a `SetFeature` on them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

import vllm_weir as weir
from tests.support.sae_reference import PURSUIT, Reference, weights
from tests.support.steered import check, sampling
from vllm_weir.schema.positions import Positions

WIDTHS = {"mlp_post": 192}
D, D_HEAD, FEATURES, BLOCKS = 128, 32, 96, 4
EVERYTHING = [weir.Capture("resid_post"), weir.Capture("resid_pre")]


def random_sae(architecture, site, seed=0, d_in=0, **options):
    tensors = weights(architecture, seed, d_in or WIDTHS.get(site[0], D), FEATURES)
    return weir.SAE.from_tensors(architecture, site, **tensors, **options)


def transcoder(architecture, seed=0, d_out=D, **options):
    tensors = weights(architecture, seed, D, FEATURES)
    generator = torch.Generator().manual_seed(seed)
    tensors |= {"W_dec": torch.randn(FEATURES, d_out, generator=generator) / 9, "b_dec": torch.zeros(d_out)}
    if "W_skip" in tensors:
        tensors["W_skip"] = torch.randn(d_out, D, generator=generator) / 9
    return weir.SAE.from_tensors(architecture, ("mlp_in", 1), **tensors, **options)


def cross_layer(architecture="jumprelu_transcoder", seed=0, hook="mlp_in", **options):
    """A cross-layer transcoder of the tiny model's blocks."""
    parts = [transcoder(architecture, seed + layer, **options).tensors for layer in range(BLOCKS)]
    generator = torch.Generator().manual_seed(seed)
    decoders = [torch.randn(FEATURES, BLOCKS - layer, D, generator=generator) / 9 for layer in range(BLOCKS)]
    tensors = {name: [part[name] for part in parts] for name in parts[0]} | {"W_dec": decoders}
    options |= {"out_site": ("mlp_out", 0), "layers": range(BLOCKS)}
    return weir.SAE.from_tensors(architecture, (hook, 0), **tensors, **options)


@contextlib.contextmanager
def loading(llm: Any) -> Iterator[Callable[[str, Any], Any]]:
    """Load autoencoders by name, and unload those that are still there at the end."""
    names = []

    def load(name: str, sae: Any) -> Any:
        weir.load_sae(llm, name, sae)
        names.append(name)
        return sae

    yield load
    for name in names:
        if name in {one.name for one in weir.saes(llm)}:
            weir.unload_sae(llm, name)


@dataclass
class Edited:
    """The reference of a `SetFeature`: the autoencoder's own arithmetic in float64, its error kept."""

    sae: weir.SAE
    asked: weir.SetFeature
    per_layer: ClassVar[bool] = False
    neurons: ClassVar[None] = None
    vectors: ClassVar[tuple] = ()
    active: list[bool] = field(default_factory=list)

    def __post_init__(self):
        self.hook, self.layers = self.sae.site.hook, (self.sae.site.layer,)
        self.heads = None if self.sae.head is None else (self.sae.head,)
        self.positions = Positions.parse(self.asked.positions)
        config = self.sae.config
        options = {name: getattr(config, name) for name in ("apply_b_dec_to_input", "k", *PURSUIT)}
        options["normalize_activations"] = config.normalize_activations
        self.reference = Reference(self.sae.architecture, dict(self.sae.tensors), **options)

    def changed(self, h):
        was = self.reference.encode(h)[:, self.asked.feature]
        self.active += (was != 0).tolist()
        rows = [
            self.reference.with_feature(row[None], self.asked.feature, self.asked.target(float(a)))
            for row, a in zip(h, was, strict=True)
        ]
        return torch.cat([torch.from_numpy(row).float() for row in rows])


class Decoded(Edited):
    """The reference of a `Reconstruct`, and of each `SetFeature` that stands before it: no error is kept."""

    edits: Sequence[weir.SetFeature] = ()

    def changed(self, h):
        features = self.reference.encode(h)
        was = features.copy()
        for one in self.edits:
            features[:, one.feature] += [one.target(a) - a for a in was[:, one.feature]]
        return torch.from_numpy(self.reference.decode(features, h)).float()


def run(llm, asked, prompts, capture=EVERYTHING):
    params = [weir.params(sampling(), capture=capture, interventions=each) for each in asked]
    return llm.generate(prompts, params, use_tqdm=False)


def checked(out: Any, order: list[Any], saes: dict[str, Any], oracle: Any) -> list[bool]:
    """Check one request against the reference of its interventions; return where a feature that was set was active."""
    items, parts, reads = [], [], []
    for item in order:
        if not isinstance(item, weir.SetFeature):
            items.append(item)
        elif (sae := saes[item.name]).config.is_transcoder:
            parts.append(Elsewhere(sae.block(item.layer) if sae.layers else sae, item))
            items += parts[-1].writes
            reads.append(parts[-1].reads)
        else:
            parts.append(Edited(sae, item))
            items.append(parts[-1])
    check(out, items + reads, oracle)
    return [one for part in parts for one in part.active]


class Elsewhere:
    """The reference of a `SetFeature` on a transcoder, as parts for `SteeredOracle.steered`.

    `reads` encodes the row that the MLP reads, and stands last in the list; `writes`, one for each block that is
    written, stand where the `SetFeature` does. All act at the same positions.
    """

    def __init__(self, sae: weir.SAE, asked: weir.SetFeature) -> None:
        normalized = sae.config.normalize_activations
        k = sae.config.k
        reference = Reference(sae.architecture, dict(sae.tensors), normalize_activations=normalized, k=k)
        directions = sae.tensors["W_dec"][asked.feature].double().reshape(-1, sae.d_out)
        self.activations = torch.zeros(0, dtype=torch.float64)

        def read(h: torch.Tensor) -> torch.Tensor:
            self.activations = torch.from_numpy(reference.encode(h)[:, asked.feature])
            return h

        def write(direction: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
            target = torch.tensor([asked.target(float(a)) for a in self.activations], dtype=torch.float64)
            return (h.double() + (target - self.activations)[:, None] * direction).float()

        self.reads = _Part(sae.site, asked, read)
        self.writes = [
            _Part((sae.out_site.hook, layer), asked, functools.partial(write, direction))
            for layer, direction in enumerate(directions, sae.out_site.layer)
        ]

    @property
    def active(self) -> list[bool]:
        """Where the feature was, by position."""
        return (self.activations != 0).tolist()


class _Part:
    vectors, neurons, heads, per_layer = (), None, None, False

    def __init__(self, site: Any, asked: weir.SetFeature, changed: Any) -> None:
        (self.hook, layer), self.changed = site, changed
        self.layers = (layer,)
        self.positions = Positions.parse(asked.positions)
