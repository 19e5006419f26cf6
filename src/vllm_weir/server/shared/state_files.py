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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from vllm_weir.frontend.admission.vector_registry import RegistryContents
from vllm_weir.schema.vectors import Vector
from vllm_weir.server.errors import StateNotSaved
from vllm_weir.server.shared.directory import locked
from vllm_weir.server.shared.state_json import VECTOR_SUFFIX, from_file, from_json, to_file, to_json, vectors_of
from vllm_weir.util.atomic_write import atomic_write

logger = logging.getLogger(__name__)
_STATE, _LOCK = "state.json", "lock"
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
        text = json.dumps(to_json(contents, arrays), separators=(",", ":"), allow_nan=False)
        missing = [digest for digest in arrays if not self._vector_path(digest).exists()]
        try:
            for digest in missing:
                self._write(self._vector_path(digest), to_file(arrays[digest]))
            self._write(self._path, text.encode(), contents.generation)
        except OSError:
            for digest in missing:
                self._vector_path(digest).unlink(missing_ok=True)
            raise
        with suppress(OSError):  # the change is made; the next one cleans up
            for file in self._folder.iterdir():
                if file.suffix == ".tmp" or (file.suffix == VECTOR_SUFFIX and file.stem not in arrays):
                    file.unlink()

    def _write(self, path: Path, data: bytes, generation: int | None = None) -> None:
        with atomic_write(path, 0o600) as file:
            file.write(data)
            if generation is not None:
                file.flush()  # a later write would set the time again
                os.utime(file.fileno(), ns=(generation * _SECOND, generation * _SECOND))

    def _vector_path(self, digest: str) -> Path:
        return self._folder / f"{digest}{VECTOR_SUFFIX}"

    def _load(self, current: RegistryContents) -> RegistryContents:
        """Return the newer of `current` and the state on disk, without reading vectors again."""
        vectors = {vector.digest: vector for vector in vectors_of(current)}
        while True:
            data = json.loads(self._path.read_bytes())
            if data["generation"] <= current.generation:
                return current
            try:
                return from_json(data, lambda digest: vectors.get(digest) or self._read_vector(digest))
            except FileNotFoundError:
                # A writer removed a vector of this state, so there is a newer one.
                if json.loads(self._path.read_bytes())["generation"] == data["generation"]:
                    raise

    def _read_vector(self, digest: str) -> Vector:
        return from_file(self._vector_path(digest).read_bytes(), self._vector_path(digest))
