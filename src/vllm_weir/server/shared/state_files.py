"""State that a server's processes share: named vectors, modules, probes, and steering of every request.

A directory holds ``state.json`` and a safetensors file for each vector, named by its digest. A
change is made under a file lock: first the vectors are written, then the new state under a
temporary name. Its modification time is set to its generation, and it is renamed over the old
state. So a reader sees a whole state, and one ``os.stat`` tells whether it is new. The next writer
cleans up after one that died.

This is not sqlite3: every request would open a transaction instead of calling ``os.stat``.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.probe_registry import RegisteredProbe
from vllm_weir.frontend.admission.sae_registry import SharedSAE
from vllm_weir.frontend.admission.vector_registry import NamedVector, RegistryContents
from vllm_weir.schema.intervention_kinds import Kept, parse_stored
from vllm_weir.schema.probes import parse_probe
from vllm_weir.schema.vectors import Vector
from vllm_weir.server.errors import StateNotSaved
from vllm_weir.server.shared.directory import locked
from vllm_weir.util.atomic_write import atomic_write

logger = logging.getLogger(__name__)
_STATE, _LOCK, _VECTOR_SUFFIX = "state.json", "lock", ".safetensors"
_SECOND = 1_000_000_000


class SharedState:
    """The shared state in a directory. Several threads may use one instance.

    Args:
        folder: The directory, created with mode 0700 if it does not exist.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = self._folder / _STATE
        self._contents = RegistryContents()
        self._load_lock = threading.Lock()
        self._removed = False
        with locked(self._folder / _LOCK):
            if not self._path.exists():
                self._publish(RegistryContents(generation=1))

    def read(self) -> RegistryContents:
        """Return the newest contents; the same object, after one ``os.stat``, if unchanged."""
        contents = self._contents
        try:
            generation = os.stat(self._path).st_mtime_ns // _SECOND
        except FileNotFoundError:
            if not self._removed:  # nobody can change the state any more, so it stays valid
                self._removed = True
                logger.error("%s was removed: vectors, modules and steering can no longer be changed", self._folder)
            return contents
        if generation == contents.generation:
            return contents
        with self._load_lock:
            self._contents = self._load(self._contents)
            return self._contents

    def change(self, edit: Callable[[RegistryContents], RegistryContents]) -> RegistryContents:
        """Replace the contents by what `edit` makes of the newest; if it raises, nothing changes.

        Returns:
            The new contents, or newer ones. Every later `read` in any process returns them.

        Raises:
            StateNotSaved: If the disk refuses them.
        """
        try:
            with locked(self._folder / _LOCK):
                before = self.read()
                after = edit(before)
                self._publish(replace(after, generation=before.generation + 1))
        except OSError as e:
            logger.error("vectors, modules and steering were not changed: %s: %s", self._folder, e)
            raise StateNotSaved(  # without the server's paths, which are not the client's business
                f"the server could not save the change ({e.strerror or 'it cannot be read'}); nothing was changed; "
                "ask its operator to make room in WEIR_SERVE_DIRECTORY, then send the request again"
            ) from None
        return self.read()

    def _publish(self, contents: RegistryContents) -> None:
        """Write a state; the lock is held. After an error (a full disk) nothing of it remains."""
        arrays: dict[str, np.ndarray] = {}
        text = json.dumps(_to_json(contents, arrays), separators=(",", ":"), allow_nan=False)
        missing = [digest for digest in arrays if not self._vector_path(digest).exists()]
        try:
            for digest in missing:
                self._write(self._vector_path(digest), save({"v": arrays[digest]}))
            self._write(self._path, text.encode(), contents.generation)
        except OSError:
            for digest in missing:
                self._vector_path(digest).unlink(missing_ok=True)
            raise
        with suppress(OSError):  # the change is made; the next one cleans up
            for file in self._folder.iterdir():
                if file.suffix == ".tmp" or (file.suffix == _VECTOR_SUFFIX and file.stem not in arrays):
                    file.unlink()

    def _write(self, path: Path, data: bytes, generation: int | None = None) -> None:
        with atomic_write(path, 0o600) as file:
            file.write(data)
            if generation is not None:
                file.flush()  # a later write would set the time again
                os.utime(file.fileno(), ns=(generation * _SECOND, generation * _SECOND))

    def _vector_path(self, digest: str) -> Path:
        return self._folder / f"{digest}{_VECTOR_SUFFIX}"

    def _load(self, current: RegistryContents) -> RegistryContents:
        """Return the newer of `current` and the state on disk, without reading vectors again."""
        vectors = {vector.digest: vector for vector in _vectors(current)}
        while True:
            data = json.loads(self._path.read_bytes())
            if data["generation"] <= current.generation:
                return current
            try:
                return _from_json(data, lambda digest: vectors.get(digest) or self._read_vector(digest))
            except FileNotFoundError:
                # A writer removed a vector of this state, so there is a newer one.
                if json.loads(self._path.read_bytes())["generation"] == data["generation"]:
                    raise

    def _read_vector(self, digest: str) -> Vector:
        try:
            array = load(self._vector_path(digest).read_bytes())["v"]
        except (SafetensorError, KeyError) as e:
            raise OSError(f"{self._vector_path(digest)} is damaged: {e}") from e
        array.setflags(write=False)
        return Vector(array=array)


def _vectors(contents: RegistryContents) -> Iterator[Vector]:
    for named in contents.vectors.values():
        yield from named.directions.values()
    for module in (*contents.modules.values(), contents.always):
        for intervention in module:
            yield from intervention.given
    for registered in contents.probes.values():
        yield from registered.probe.given


def _to_json(contents: RegistryContents, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
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
        "probes": {
            name: [with_digests(one.probe).to_json(), one.everyone, one.alerts, one.buckets]
            for name, one in contents.probes.items()
        },
    }


def _from_json(data: Mapping[str, Any], vector_of: Callable[[str], Vector]) -> RegistryContents:
    """Return the state that `_to_json` wrote; `vector_of` returns the vector with a digest."""

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
