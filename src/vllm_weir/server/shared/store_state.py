"""What is registered, in a store that several servers share.

Each change makes a new file ``states/<generation>.json``, which a store creates only if there is
none: of two servers that change the same generation one wins, and the other applies its change to
what the winner made. So no change is lost, and whether there is news is whether the next file is
there. Vectors and the files of autoencoders and lenses have names that are used once, and go an
hour after nothing names them any more.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.vector_registry import RegistryContents
from vllm_weir.schema.vectors import Vector
from vllm_weir.server.errors import StateNotSaved
from vllm_weir.server.shared.state_json import VECTOR_SUFFIX, from_file, from_json, to_file, to_json, vectors_of
from vllm_weir.server.shared.store import FIELD, Store

logger = logging.getLogger(__name__)
_STATES, _FILES, _MODEL = "states", "files", "model.json"
PERIOD = 0.5
"""Seconds between two looks for news."""
PATIENCE = 10.0
"""Seconds until the next look after one that failed."""
KEPT = 3600.0
"""Seconds for which a file that nothing names stays: it may belong to a change that is being made."""
FRESH = 1200.0
"""Seconds for which it holds that the next generation, which was not there, was not there and gone either."""
_TIDIED = 64
"""Every how many changes old files are removed."""

Arrive = Callable[[RegistryContents], Callable[[], None]]
"""Gets this server ready for contents before requests meet them, and returns what lets go of earlier ones.

Both raise OSError if they cannot."""


class StoreState:
    """The shared state in a store. Several threads may use one instance.

    `read` answers from memory; `start` looks for news twice a second in a thread of its own.

    Args:
        folder: where this server has its copies of the files of autoencoders and lenses.
    """

    def __init__(self, store: Store, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._contents = RegistryContents()
        self._names: Mapping[str, str] = {}
        """Digest of a vector of the contents -> its file."""
        self._checked = 0.0
        self._arrive: Arrive = lambda _contents: lambda: None
        self._lock = threading.RLock()
        self._stopped = threading.Event()

    def read(self) -> RegistryContents:
        """Return the newest contents that this server is ready for; the same object while nothing has changed."""
        return self._contents

    def start(self, model: Mapping[str, Any], arrive: Arrive) -> None:
        """Load what there is for this model, and from now on what other servers change.

        Raises:
            OSError: if the store cannot be read.
            WeirError: if it is the store of another model.
        """
        facts = json.dumps(model)
        if not self._store.create(_MODEL, facts.encode()) and (there := json.loads(self._store.read(_MODEL))) != model:
            told = ", ".join(f"{key} {there.get(key)!r} and not {one!r}" for key, one in model.items())
            raise WeirError(
                f"{self._store.url} has the names of another model ({told}); name another store, or the same model "
                "with --served-model-name",
                FIELD,
            )
        self._arrive = arrive
        self.refresh()
        threading.Thread(target=self._watch, name="weir-store", daemon=True).start()

    def close(self) -> None:
        """Stop looking for news."""
        self._stopped.set()

    def refresh(self) -> None:
        """Load what other servers have changed."""
        with self._lock:
            data = self._news()
            if data is None:
                return
            names: dict[str, str] = data["files"]
            known = {vector.digest: vector for vector in vectors_of(self._contents)}

            def vector_of(digest: str) -> Vector:
                return known.get(digest) or from_file(self._store.read(names[digest]), names[digest])

            contents = from_json(self._with_paths(data, lambda file: str(self._folder / file)), vector_of)
            let_go = self._arrive(contents)
            self._contents, self._names = contents, names
            let_go()

    def change(self, edit: Callable[[RegistryContents], RegistryContents]) -> RegistryContents:
        """Replace the contents by what `edit` makes of the newest; if it raises, nothing changes.

        It may be called several times, for what others have changed meanwhile.

        Raises:
            StateNotSaved: If the store cannot be read or written.
        """
        with self._lock:
            try:
                names = None
                while names is None:
                    self.refresh()
                    edited = edit(self._contents)
                    if edited is self._contents:
                        return edited
                    after = replace(edited, generation=self._contents.generation + 1)
                    names = self._publish(after)
            except OSError as e:
                logger.error("vectors, modules and steering were not changed: %s: %s", self._store.url, e)
                raise StateNotSaved(
                    "the server could not save the change in its store; nothing was changed; ask its operator to see "
                    "to the server's log, then send the request again"
                ) from None
            self._contents, self._names = after, names
            self._arrive(after)()
            if after.generation % _TIDIED == 0:
                with suppress(OSError):  # the change is made; a later one tidies up
                    self._tidy()
            return after

    def _news(self) -> dict[str, Any] | None:
        """Return the newest state if it is newer than the contents, else None."""
        newest = None
        if time.time() - self._checked > FRESH:
            there = sorted(self._store.files(_STATES))
            newest = there[-1] if there and there[-1] > _name(self._contents.generation) else None
        data = None if newest is None else json.loads(self._store.read(newest))
        try:
            while True:
                now = time.time()
                following = (self._contents.generation if data is None else data["generation"]) + 1
                data = json.loads(self._store.read(_name(following)))
        except FileNotFoundError:
            self._checked = now
        return data

    def _publish(self, contents: RegistryContents) -> Mapping[str, str] | None:
        """Write contents; return the files of their vectors, None if others have, or may have, made this generation."""
        arrays: dict[str, np.ndarray] = {}
        data = to_json(contents, arrays)
        names = {digest: self._names.get(digest, "") for digest in arrays}
        for digest in (digest for digest, name in names.items() if not name):
            names[digest] = f"{_FILES}/{digest}-{secrets.token_hex(8)}{VECTOR_SUFFIX}"
            self._store.create(names[digest], to_file(arrays[digest]))
        for path in _paths(contents) - _paths(self._contents):
            self._store.upload(Path(path), f"{_FILES}/{self._relative(path)}")
        if time.time() - self._checked > FRESH:
            return None
        # The token tells this state from the same one of another server.
        data = self._with_paths(data, self._relative) | {"files": names, "token": secrets.token_hex(8)}
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
        return names if self._store.create(_name(contents.generation), text.encode()) else None

    def _relative(self, path: str) -> str:
        return str(Path(path).relative_to(self._folder))

    def fetch(self, path: Path, target: Path) -> None:
        """Copy the file that the contents name by its path on this server."""
        self._store.download(f"{_FILES}/{self._relative(str(path))}", target)

    def _with_paths(self, data: dict[str, Any], path: Callable[[str], str]) -> dict[str, Any]:
        saes = {name: [key, path(file)] for name, (key, file) in data["saes"].items()}
        lenses = {name: [path(file) for file in files] for name, files in data["lenses"].items()}
        return {**data, "saes": saes, "lenses": lenses}

    def _tidy(self) -> None:
        """Remove states and files that nobody will ask for any more."""
        states = self._store.files(_STATES)
        now = max(modified for modified, _ in states.values())  # by the store's clock
        newest = max(states)
        named = set(self._names.values()) | {f"{_FILES}/{self._relative(path)}" for path in _paths(self._contents)}
        for name, (modified, _) in (states | self._store.files(_FILES)).items():
            if modified < now - KEPT and name != newest and name not in named:
                self._store.remove(name)

    def _watch(self) -> None:
        failure, wait = "", PERIOD
        while not self._stopped.wait(wait):
            try:
                self.refresh()
            except Exception as e:  # noqa: BLE001 - whatever it was, the next look may find it mended
                if str(e) != failure:
                    logger.error("this server lacks what others have changed in %s: %s", self._store.url, e)
                failure, wait = str(e), PATIENCE
            else:
                if failure:
                    logger.warning("this server has what others have changed in %s again", self._store.url)
                failure, wait = "", PERIOD


def _name(generation: int) -> str:
    return f"{_STATES}/{generation:012}.json"


def _paths(contents: RegistryContents) -> set[str]:
    """Return the local paths of the files of autoencoders and lenses."""
    return {sae.path for sae in contents.saes.values()} | {p for files in contents.lenses.values() for p in files}
