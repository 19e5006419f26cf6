"""The vector registry: vectors and modules kept by name, and vectors by digest, in the caller's process."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.intervention_base import Intervention
from vllm_weir.schema.interventions import Add
from vllm_weir.schema.vectors import KEPT, Vector

MAX_NAMES = 10_000
_OF_LAYER = re.compile(r"^(.+)\[(\d{1,9})\]$", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class NamedVector:
    """What stands under a name: an array ([d], [n, d] or [layers, n, d], under None), or a direction [d] for each of
    some blocks."""

    directions: Mapping[int | None, Vector]

    @property
    def layers(self) -> list[int]:
        """Blocks that have a direction of their own; empty for one vector."""
        return sorted(layer for layer in self.directions if layer is not None)


@dataclass(frozen=True)
class RegistryContents:
    """All that a server keeps by name, and what every request undergoes.

    Attributes:
        generation: grows with every change.
        always: interventions of every request, in order; the first `tiers` of them were given by tier, hook and layer.
    """

    generation: int = 0
    vectors: Mapping[str, NamedVector] = field(default_factory=dict)
    modules: Mapping[str, tuple[Intervention, ...]] = field(default_factory=dict)
    always: tuple[Intervention, ...] = ()
    tiers: int = 0


class RegistryBackend(Protocol):
    """Where several processes of one server keep their contents."""

    def read(self) -> RegistryContents:
        """The newest contents; the same object, and cheap, while nothing has changed."""


class VectorRegistry:
    """A name is looked up when a request is admitted, so what it meant then is what the request gets."""

    def __init__(self) -> None:
        self._by_name: dict[str, NamedVector] = {}
        self._modules: Mapping[str, tuple[Intervention, ...]] = {}
        self._by_digest: dict[str, Vector] = {}
        self.version = 0
        """Grows when a name changes its meaning."""

    def load(self, contents: RegistryContents) -> None:
        """Keep these, and nothing else."""
        self._by_name, self._modules = dict(contents.vectors), contents.modules
        self._changed()

    def _changed(self) -> None:
        kept = (v for named in self._by_name.values() for v in named.directions.values())
        self._by_digest = {v.digest: v for v in kept}
        self.version += 1

    def put(self, name: str, vector: Any) -> str:
        """Keep `vector` ([d], [n, d] or [layers, n, d]) under `name`, replacing what was there; returns its digest."""
        if not isinstance(name, str) or not 0 < len(name) <= 256:
            raise WeirError("a name is a string of 1 to 256 characters", "name")
        if len(self._by_name) >= MAX_NAMES and name not in self._by_name:
            raise WeirError(f"{MAX_NAMES} vectors are registered already; unregister some", "name")
        parsed = Vector.parse(vector, "vector", KEPT)
        if parsed.array is None:
            parsed = Vector(array=self.find(parsed.ref, "vector"))
        self._by_name[name] = NamedVector({None: parsed})
        self._changed()
        return parsed.digest

    def remove(self, name: str) -> None:
        """Forget a name; requests that were admitted with it go on."""
        if name not in self._by_name:
            raise WeirError(f"no vector is registered under {name!r}", "name")
        del self._by_name[name]
        self._changed()

    def names(self) -> dict[str, dict[str, Any]]:
        """name -> {digest, shape}; of a name with directions of several blocks, each as ``name[block]``."""
        out = {}
        for name, named in sorted(self._by_name.items()):
            for layer, v in named.directions.items():
                out[name if layer is None else f"{name}[{layer}]"] = {"digest": v.digest, "shape": _shape(v)}
        return out

    def find(self, ref: str, field: str) -> np.ndarray:
        """The array under a name or digest; raises WeirError naming `field`."""
        vector = self._named(ref, field) or self._by_digest.get(ref)
        if vector is None or vector.array is None:
            raise WeirError(f"no vector is registered under {ref!r}; {_known(self._by_name)}", field)
        return vector.array

    def _named(self, ref: str, field: str) -> Vector | None:
        named = self._by_name.get(ref)
        if named is None:
            match = _OF_LAYER.match(ref)
            of_blocks = self._by_name.get(match[1]) if match else None
            return None if match is None or of_blocks is None else of_blocks.directions.get(int(match[2]))
        if None not in named.directions:
            raise WeirError(
                f"{ref!r} has a direction for each of {len(named.layers)} blocks: name one ({ref}[{named.layers[0]}]), "
                f'or ask for all of them where they belong, "modules": ["{ref}"]',
                field,
            )
        return named.directions[None]

    def module(self, name: str, field: str) -> Sequence[Intervention]:
        """The interventions under a name; directions of blocks are added to the stream leaving them."""
        if name in self._modules:
            return self._modules[name]
        named = self._by_name.get(name)
        if named is None or None in named.directions:
            have = {*self._modules, *(n for n, v in self._by_name.items() if v.layers)}
            what = "a vector, but no module," if named is not None else "no module"
            raise WeirError(f"{what} is registered under {name!r}; {_known(have)}", field)
        return [Add(v, layer, path=field) for layer, v in named.directions.items() if layer is not None]


def _known(names: Iterable[str]) -> str:
    some = sorted(names)
    if not some:
        return "none are (weir.register does that, or PUT /v1/vectors/NAME and POST /v1/steering/modules/register)"
    return "registered are " + ", ".join(some[:20]) + (f" and {len(some) - 20} more" if len(some) > 20 else "")


def _shape(vector: Vector) -> list[int]:
    return [] if vector.array is None else list(vector.array.shape)
