"""What the API-server processes of one server share: vectors and modules by name, interventions of every request.

A directory holds ``state.json`` and a safetensors file for each vector, named by its content. A change is made under a
file lock: vectors first, then the new state under a temporary name, whose time of modification is set to its
generation and which is then renamed over the old one. So a reader sees a whole state, and one ``os.stat`` tells whether
it is a new one. What a writer that died left behind is cleaned up by the next.
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
from vllm_weir.frontend.admission.vector_registry import NamedVector, RegistryContents
from vllm_weir.schema.intervention_base import Intervention
from vllm_weir.schema.interventions import parse_intervention
from vllm_weir.schema.vectors import Vector
from vllm_weir.server.errors import StateNotSaved
from vllm_weir.server.shared.directory import locked

logger = logging.getLogger(__name__)
_STATE, _LOCK, _VECTOR = "state.json", "lock", ".safetensors"
_SECOND = 1_000_000_000


class SharedState:
    """The contents of a directory, in step with other processes that use it. Safe to use from several threads.

    Args:
        folder: made if need be, for its owner only.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = self._folder / _STATE
        self._contents = RegistryContents()
        self._reading = threading.Lock()
        self._gone = False
        with locked(self._folder / _LOCK):
            if not self._path.exists():
                self._publish(RegistryContents(generation=1))

    def read(self) -> RegistryContents:
        """The newest contents; the same object, after one ``os.stat``, while nothing has changed."""
        contents = self._contents
        try:
            generation = os.stat(self._path).st_mtime_ns // _SECOND
        except FileNotFoundError:
            if not self._gone:  # nobody can change what is not there: what is known stays right
                self._gone = True
                logger.error("%s was removed: names and steering of this server can no longer be changed", self._folder)
            return contents
        if generation == contents.generation:
            return contents
        with self._reading:
            self._contents = self._load(self._contents)
            return self._contents

    def change(self, edit: Callable[[RegistryContents], RegistryContents]) -> RegistryContents:
        """Replace the contents by what `edit` makes of the newest; what it raises changes nothing.

        Returns:
            The new contents, which every later `read` in any process gives, or newer ones.

        Raises:
            NotKept: if the disk refuses them.
        """
        try:
            with locked(self._folder / _LOCK):
                before = self.read()
                after = edit(before)
                self._publish(replace(after, generation=before.generation + 1))
        except OSError as e:
            logger.error("names and steering of this server stay as they are: %s: %s", self._folder, e)
            raise StateNotSaved(  # a client is told why, and no path of the server
                f"the server's disk did not take the change ({e.strerror or 'it cannot be read'}), and all is as it "
                "was; ask whoever runs the server to make room where it keeps names (WEIR_SERVE_DIRECTORY), then send "
                "it again"
            ) from None
        return self.read()

    def _publish(self, contents: RegistryContents) -> None:
        """Write a state; the lock is held. After an error (a full disk) nothing of it is left."""
        arrays: dict[str, np.ndarray] = {}
        text = json.dumps(_to_json(contents, arrays), separators=(",", ":"), allow_nan=False)
        fresh = [digest for digest in arrays if not self._vector(digest).exists()]
        try:
            for digest in fresh:
                self._write(self._vector(digest), save({"v": arrays[digest]}))
            self._write(self._path, text.encode(), contents.generation)
        except OSError:
            for digest in fresh:
                self._vector(digest).unlink(missing_ok=True)
            raise
        with suppress(OSError):  # the change stands; the next one cleans up
            for file in self._folder.iterdir():
                if file.suffix == ".tmp" or (file.suffix == _VECTOR and file.stem not in arrays):
                    file.unlink()

    def _write(self, path: Path, data: bytes, generation: int | None = None) -> None:
        temporary = path.with_name(f"{path.name}.tmp")
        try:
            with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as out:
                out.write(data)
            if generation is not None:
                os.utime(temporary, ns=(generation * _SECOND, generation * _SECOND))
            os.rename(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def _vector(self, digest: str) -> Path:
        return self._folder / f"{digest}{_VECTOR}"

    def _load(self, known: RegistryContents) -> RegistryContents:
        """The state on disk, or `known` if that is newer; vectors that are known are not read again."""
        have = {v.digest: v for v in _vectors(known)}
        while True:
            data = json.loads(self._path.read_bytes())
            if data["generation"] <= known.generation:
                return known
            try:
                return _from_json(data, lambda digest: have.get(digest) or self._read_vector(digest))
            except FileNotFoundError:
                # A writer has moved on and removed a vector of the state that was being read: there is a newer one.
                if json.loads(self._path.read_bytes())["generation"] == data["generation"]:
                    raise

    def _read_vector(self, digest: str) -> Vector:
        try:
            array = load(self._vector(digest).read_bytes())["v"]
        except (SafetensorError, KeyError) as e:
            raise OSError(f"{self._vector(digest)} is damaged: {e}") from e
        array.setflags(write=False)
        return Vector(array=array)


def _vectors(contents: RegistryContents) -> Iterator[Vector]:
    for named in contents.vectors.values():
        yield from named.directions.values()
    for one in (*(i for module in contents.modules.values() for i in module), *contents.always):
        yield from one.given


def _to_json(contents: RegistryContents, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The state, vectors by digest; they themselves go into `arrays`."""

    def keep(vector: Vector) -> str:
        if vector.array is None:
            raise WeirError(f"{vector.ref!r} is a name; what is kept has to be content")
        arrays[vector.digest] = vector.array
        return vector.digest

    def wires(interventions: Sequence[Intervention]) -> list[dict[str, Any]]:
        return [one.with_vectors(lambda v, _at: Vector(ref=keep(v))).to_json() for one in interventions]

    return {
        "generation": contents.generation,
        "vectors": {
            name: [[layer, keep(v)] for layer, v in named.directions.items()]
            for name, named in contents.vectors.items()
        },
        "modules": {name: wires(module) for name, module in contents.modules.items()},
        "always": wires(contents.always),
        "tiers": contents.tiers,
    }


def _from_json(data: Mapping[str, Any], vector: Callable[[str], Vector]) -> RegistryContents:
    def whole(wire: dict[str, Any], path: str) -> Intervention:
        return parse_intervention(wire, path).with_vectors(lambda v, _at: vector(v.ref))

    return RegistryContents(
        generation=data["generation"],
        vectors={name: NamedVector({layer: vector(d) for layer, d in kept}) for name, kept in data["vectors"].items()},
        modules={
            name: tuple(whole(wire, f"modules.{name}[{k}]") for k, wire in enumerate(wires))
            for name, wires in data["modules"].items()
        },
        always=tuple(whole(wire, f"steering[{k}]") for k, wire in enumerate(data["always"])),
        tiers=data["tiers"],
    )
