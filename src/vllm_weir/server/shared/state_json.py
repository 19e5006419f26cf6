"""What is registered, as JSON data that names vectors by their digests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.registries import RegisteredProbe
from vllm_weir.frontend.admission.sae_registry import SharedSAE
from vllm_weir.frontend.admission.vector_registry import NamedVector, RegistryContents
from vllm_weir.schema.intervention_kinds import Kept, parse_stored
from vllm_weir.schema.probes import parse_probe
from vllm_weir.schema.vectors import Vector

VECTOR_SUFFIX = ".safetensors"


def to_file(array: np.ndarray) -> bytes:
    """Return the content of a vector's file."""
    return save({"v": array})


def from_file(data: bytes, where: object) -> Vector:
    """Return the vector of a file's content; raise OSError naming `where` if it is damaged."""
    try:
        array = load(data)["v"]
    except (SafetensorError, KeyError) as e:
        raise OSError(f"{where} is damaged: {e}") from e
    array.setflags(write=False)
    return Vector(array=array)


def vectors_of(contents: RegistryContents) -> Iterator[Vector]:
    for named in contents.vectors.values():
        yield from named.directions.values()
    for module in (*contents.modules.values(), contents.always):
        for intervention in module:
            yield from intervention.given
    for registered in contents.probes.values():
        yield from registered.probe.given


def to_json(contents: RegistryContents, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the state with digests for vectors, and put the vectors into `arrays`."""

    def digest_of(vector: Vector) -> str:
        if vector.array is None:
            raise WeirError(f"{vector.ref!r} is a name, not the content of a vector, so it cannot be stored")
        arrays[vector.digest] = vector.array
        return vector.digest

    def with_digests(item: Any) -> Any:
        return item.with_vectors(lambda v, _at: Vector(ref=digest_of(v)))

    def wire_forms(interventions: Sequence[Kept]) -> list[dict[str, Any]]:
        return [with_digests(one).to_json() for one in interventions]

    return {
        "generation": contents.generation,
        "vectors": {
            name: [[layer, digest_of(v)] for layer, v in named.directions.items()]
            for name, named in contents.vectors.items()
        },
        "modules": {name: wire_forms(module) for name, module in contents.modules.items()},
        "always": wire_forms(contents.always),
        "tiers": contents.tiers,
        "saes": {name: list(shared) for name, shared in contents.saes.items()},
        "lenses": contents.lenses,
        "hooks": contents.hooks,
        "probes": {
            name: [with_digests(one.probe).to_json(), one.everyone, one.alerts, one.buckets]
            for name, one in contents.probes.items()
        },
    }


def from_json(data: Mapping[str, Any], vector_of: Callable[[str], Vector]) -> RegistryContents:
    """Return the state that `to_json` wrote; `vector_of` returns the vector with a digest."""

    def parse(wire_form: dict[str, Any], path: str) -> Kept:
        return parse_stored(wire_form, path).with_vectors(lambda v, _at: vector_of(v.ref))

    return RegistryContents(
        generation=data["generation"],
        vectors={
            name: NamedVector({layer: vector_of(d) for layer, d in stored}) for name, stored in data["vectors"].items()
        },
        modules={
            name: tuple(parse(wire_form, f"modules.{name}[{k}]") for k, wire_form in enumerate(module))
            for name, module in data["modules"].items()
        },
        always=tuple(parse(wire_form, f"steering[{k}]") for k, wire_form in enumerate(data["always"])),
        tiers=data["tiers"],
        saes={name: SharedSAE(*shared) for name, shared in data["saes"].items()},
        lenses=data.get("lenses", {}),
        hooks=data.get("hooks", {}),
        probes={
            name: RegisteredProbe(
                parse_probe(wire_form, f"probes.{name}").with_vectors(lambda v, _at: vector_of(v.ref)),
                everyone,
                tuple(alerts),
                tuple(buckets),
            )
            for name, (wire_form, everyone, alerts, buckets) in data.get("probes", {}).items()
        },
    )
