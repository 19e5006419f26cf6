"""The shelf: vectors kept by name, and by digest, in the caller's process."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.spec.vectors import Vector

MAX_NAMES = 10_000


class Shelf:
    """Named vectors. A name is looked up when a request is admitted, so what it meant then is what the request gets."""

    def __init__(self) -> None:
        self._by_name: dict[str, Vector] = {}

    def put(self, name: str, vector: Any) -> str:
        """Keep `vector` ([d] or [n, d]) under `name`, replacing what was there; returns its digest."""
        if not isinstance(name, str) or not 0 < len(name) <= 256:
            raise WeirError("a name is a string of 1 to 256 characters", "name")
        if len(self._by_name) >= MAX_NAMES and name not in self._by_name:
            raise WeirError(f"{MAX_NAMES} vectors are registered already; unregister some", "name")
        parsed = Vector.parse(vector, "vector")
        if parsed.array is None:
            parsed = Vector(array=self.find(parsed.ref, "vector"))
        self._by_name[name] = parsed
        return parsed.digest

    def remove(self, name: str) -> None:
        """Forget a name; requests that were admitted with it go on."""
        if name not in self._by_name:
            raise WeirError(f"no vector is registered under {name!r}", "name")
        del self._by_name[name]

    def names(self) -> dict[str, dict[str, Any]]:
        """name -> {digest, shape}."""
        return {n: {"digest": v.digest, "shape": _shape(v)} for n, v in sorted(self._by_name.items())}

    def find(self, ref: str, field: str) -> np.ndarray:
        """The array under a name or digest; raises WeirError naming `field`."""
        vector = self._by_name.get(ref)
        if vector is None:
            vector = next((v for v in self._by_name.values() if v.digest == ref), None)
        if vector is None or vector.array is None:
            raise WeirError(f"no vector is registered under {ref!r}; weir.register(llm, name, vector) does that", field)
        return vector.array


def _shape(vector: Vector) -> list[int]:
    return [] if vector.array is None else list(vector.array.shape)
