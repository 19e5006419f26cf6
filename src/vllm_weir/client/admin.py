"""The parts of a client that look after the server itself: vectors by name, steering for everyone.

One class each for both clients: of an `AsyncClient` every method gives an awaitable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vllm_weir.client.effects import SendRequest
from vllm_weir.client.results import Chunk, Completion
from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.json_text import dumps
from vllm_weir.schema.request import parse_interventions
from vllm_weir.schema.vectors import KEPT, Vector

INFO = SendRequest("GET", "/v1/weir/info")
_TYPES = {".safetensors": "application/octet-stream", ".gguf": "application/octet-stream", ".json": "application/json"}


def same(data: Any) -> Any:
    """What the server said, as it is."""
    return data


def mark(answer: str | Completion | Chunk, metadata: dict[str, Any]) -> SendRequest:
    """See `WorkerProcess.mark`."""
    if isinstance(answer, Chunk):
        answer = answer.result if answer.result is not None else answer.raw.id
    name = answer.id if isinstance(answer, Completion) else answer
    if not isinstance(name, str) or not name:
        raise WeirError(f"an answer or its id, got {brief(answer)!r}", "answer")
    dumps(metadata, "metadata")
    return SendRequest("POST", "/v1/marks", json={"id": name, "metadata": metadata}, repeatable=False)


class VectorAdmin:
    """``client.vectors``: vectors that the server keeps under a name, for ``Add("name", ...)``."""

    def __init__(self, tell: Callable[[SendRequest, Callable[[Any], Any]], Any]) -> None:
        self._tell = tell

    def put(self, name: str, vector: Any) -> Any:
        """Keep a vector under a name, in place of an earlier one. Needs the admin key.

        Args:
            vector: a tensor, array or list, [d_model] or [n, d_model]; or the path of a safetensors, GGUF or JSON file.

        Returns:
            What the server keeps: its digest and shape.
        """
        if isinstance(vector, Path):
            kind = _TYPES.get(vector.suffix)
            if kind is None:
                raise WeirError(f"a vector's file is {', '.join(_TYPES)}, got {vector.name!r}", "vector")
            headers = {"Content-Type": kind}
            return self._tell(
                SendRequest("PUT", _vector(name), content=vector.read_bytes(), headers=headers, admin=True), same
            )
        content = Vector.parse(vector, "vector", KEPT).to_json()
        return self._tell(SendRequest("PUT", _vector(name), json=content, admin=True), same)

    def get(self, name: str) -> Any:
        """What the server keeps under a name."""
        return self._tell(SendRequest("GET", _vector(name)), same)

    def delete(self, name: str) -> Any:
        """Forget a name. Needs the admin key."""
        return self._tell(SendRequest("DELETE", _vector(name), admin=True), same)

    def list(self) -> Any:
        """What the server keeps, by name."""
        return self._tell(SendRequest("GET", "/v1/vectors"), same)


class SteeringAdmin:
    """``client.steering``: what every request of the server undergoes."""

    def __init__(self, tell: Callable[[SendRequest, Callable[[Any], Any]], Any]) -> None:
        self._tell = tell

    def set(self, interventions: Any = None, *, replace: bool = False, **tiers: Any) -> Any:
        """Steer every request admitted from now on. Needs the admin key.

        Args:
            interventions: as for `weir.params`; they take the place of earlier ones.
            replace: whether all earlier steering goes, not only what this speaks of.
            tiers: ``vectors``, ``prefill_vectors``, ``decode_vectors``: ``{hook: {layer: vector}}``, a vector being a
                tensor, an array, a list or ``{"vector": ..., "scale": float}``; and what else the server takes.
        """
        body = _steering(interventions, tiers) | ({"replace": True} if replace else {})
        return self._tell(SendRequest("POST", "/v1/steering/set", json=body, admin=True, repeatable=False), same)

    def clear(self) -> Any:
        """Steer only by what requests ask for. Needs the admin key."""
        return self._tell(SendRequest("POST", "/v1/steering/clear", json={}, admin=True, repeatable=False), same)

    def get(self) -> Any:
        """What every request undergoes now."""
        return self._tell(SendRequest("GET", "/v1/steering"), same)

    def register(self, name: str, interventions: Any = None, **tiers: Any) -> Any:
        """Keep interventions on the server under a name, for requests' ``modules``. Needs the admin key."""
        body = {"name": name} | _steering(interventions, tiers)
        return self._tell(
            SendRequest("POST", "/v1/steering/modules/register", json=body, admin=True, repeatable=False), same
        )

    def unregister(self, name: str) -> Any:
        """Forget such a name. Needs the admin key."""
        call = SendRequest("POST", "/v1/steering/modules/unregister", json={"name": name}, admin=True, repeatable=False)
        return self._tell(call, same)

    def modules(self) -> Any:
        """The names."""
        return self._tell(SendRequest("GET", "/v1/steering/modules"), same)

    def layers(self) -> Any:
        """Where the server can steer."""
        return self._tell(SendRequest("GET", "/v1/steering/layers"), same)


def plain(value: Any) -> Any:
    """JSON data of data that holds tensors and arrays."""
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if hasattr(value, "detach"):  # a torch tensor, without importing torch for those who have none
        value = value.detach().cpu().float()
    return value.tolist() if hasattr(value, "tolist") else value


def _steering(interventions: Any, tiers: Mapping[str, Any]) -> dict[str, Any]:
    own = [] if interventions is None else parse_interventions(interventions, "interventions")
    return plain(tiers) | ({} if interventions is None else {"interventions": [i.to_json() for i in own]})


def _vector(name: str) -> str:
    if not isinstance(name, str) or not name:
        raise WeirError(f"a name, got {brief(name)!r}", "name")
    return f"/v1/vectors/{quote(name, safe='')}"
