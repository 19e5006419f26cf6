"""The vector registry: vectors and modules by name, and vectors by digest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.registries import RegisteredProbe
from vllm_weir.frontend.admission.sae_registry import SharedSAE
from vllm_weir.schema.intervention_kinds import Kept
from vllm_weir.schema.interventions import Add
from vllm_weir.schema.vectors import KEPT, Vector

MAX_NAMES = 10_000
_OF_LAYER = re.compile(r"^(.+)\[(\d{1,9})\]$", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class NamedVector:
    """A registered vector.

    Attributes:
        directions: block -> a direction [d_model]; or None -> one array: [d], [n, d] or [layers, n,
            d].
    """

    directions: Mapping[int | None, Vector]

    @property
    def layers(self) -> list[int]:
        """Blocks that have a direction of their own; empty for one vector."""
        return sorted(layer for layer in self.directions if layer is not None)


@dataclass(frozen=True)
class RegistryContents:
    """All that a server has registered.

    Attributes:
        generation: grows with every change.
        modules: lists of interventions by name.
        always: interventions of every request, in order.
        tiers: how many of `always`, from the first, were given by tier, hook point and block.
        lenses: name -> paths of the files of a lens; of a store that several servers share.
        hooks: name -> ``module:attribute`` of a hook; likewise.
    """

    generation: int = 0
    vectors: Mapping[str, NamedVector] = field(default_factory=dict)
    modules: Mapping[str, tuple[Kept, ...]] = field(default_factory=dict)
    always: tuple[Kept, ...] = ()
    tiers: int = 0
    saes: Mapping[str, SharedSAE] = field(default_factory=dict)
    probes: Mapping[str, RegisteredProbe] = field(default_factory=dict)
    lenses: Mapping[str, Sequence[str]] = field(default_factory=dict)
    hooks: Mapping[str, str] = field(default_factory=dict)


class RegistryBackend(Protocol):
    """A store of registry contents that several processes of a server share."""

    def read(self) -> RegistryContents:
        """Return the newest contents; cheap, and the same object, while nothing has changed."""

    def change(self, edit: Callable[[RegistryContents], RegistryContents]) -> RegistryContents:
        """Replace the contents by what `edit` makes of the newest; if it raises, nothing changes."""


class VectorRegistry:
    """Vectors and modules by name.

    A name is looked up when a request is admitted; changing it later does not change the request.

    Attributes:
        version: grows whenever a name changes its meaning.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, NamedVector] = {}
        self._modules: Mapping[str, tuple[Kept, ...]] = {}
        self._by_digest: dict[str, Vector] = {}
        self.version = 0

    def load(self, contents: RegistryContents) -> None:
        self._by_name, self._modules = dict(contents.vectors), contents.modules
        vectors = (v for named in self._by_name.values() for v in named.directions.values())
        self._by_digest = {v.digest: v for v in vectors}
        self.version += 1

    @property
    def named(self) -> Mapping[str, NamedVector]:
        return self._by_name

    def parse(self, name: str, vector: Any) -> Vector:
        """Return the content of a vector that is to have a name; raise WeirError for other data."""
        if not isinstance(name, str) or not 0 < len(name) <= 256:
            raise WeirError("a name is a string of 1 to 256 characters", "name")
        if len(self._by_name) >= MAX_NAMES and name not in self._by_name:
            raise WeirError(f"{MAX_NAMES} vectors are registered already; unregister some", "name")
        parsed = Vector.parse(vector, "vector", KEPT)
        return Vector(array=self.find(parsed.ref, "vector")) if parsed.array is None else parsed

    def names(self) -> dict[str, dict[str, Any]]:
        """Return name -> {digest, shape}. A name with a direction per block appears as ``name[block]`` for each."""
        names = {}
        for name, named in sorted(self._by_name.items()):
            for layer, v in named.directions.items():
                names[name if layer is None else f"{name}[{layer}]"] = {"digest": v.digest, "shape": _shape(v)}
        return names

    def find(self, ref: str, field: str) -> np.ndarray:
        """Return the array under a name or digest; raise WeirError naming `field`, if there is none."""
        vector = self._named(ref, field) or self._by_digest.get(ref)
        if vector is None or vector.array is None:
            raise WeirError(f"no vector is registered under {ref!r}; {_registered(self._by_name)}", field)
        return vector.array

    def _named(self, ref: str, field: str) -> Vector | None:
        named = self._by_name.get(ref)
        if named is None:
            match = _OF_LAYER.match(ref)
            per_block = self._by_name.get(match[1]) if match else None
            return None if match is None or per_block is None else per_block.directions.get(int(match[2]))
        if None not in named.directions:
            raise WeirError(
                f"{ref!r} has a direction for each of {len(named.layers)} blocks: name one ({ref}[{named.layers[0]}]), "
                f'or apply each at its block with "modules": ["{ref}"]',
                field,
            )
        return named.directions[None]

    @property
    def modules(self) -> Mapping[str, tuple[Kept, ...]]:
        return self._modules

    def module(self, name: str, field: str) -> Sequence[Kept]:
        """Return the interventions under a name.

        For a vector with a direction per block, these are an `Add` at each of the blocks.

        Raises:
            WeirError: naming `field`, if no module has the name.
        """
        if name in self._modules:
            return self._modules[name]
        named = self._by_name.get(name)
        if named is None or None in named.directions:
            names = {*self._modules, *(n for n, v in self._by_name.items() if v.layers)}
            kind = "a vector, but no module," if named is not None else "no module"
            raise WeirError(f"{kind} is registered under {name!r}; {_registered(names)}", field)
        return [Add(v, layer, path=field) for layer, v in named.directions.items() if layer is not None]


def _registered(names: Iterable[str]) -> str:
    """Return the end of an error message that lists what is registered."""
    listed = sorted(names)
    if not listed:
        return "none are (weir.register does that, or PUT /v1/vectors/NAME and POST /v1/steering/modules/register)"
    return "registered are " + ", ".join(listed[:20]) + (f" and {len(listed) - 20} more" if len(listed) > 20 else "")


def _shape(vector: Vector) -> list[int]:
    return [] if vector.array is None else list(vector.array.shape)
