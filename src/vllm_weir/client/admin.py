"""Administration of a server: its named vectors, autoencoders, hooks and probes, and its steering of every request.

Both clients share these classes: every method returns the result, or for an `AsyncClient` an
awaitable of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vllm_weir.client.results import Chunk, Completion
from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.fields import dumps
from vllm_weir.schema.probes import load_probe, parse_probe
from vllm_weir.schema.request import parse_interventions
from vllm_weir.schema.vectors import KEPT, Vector
from vllm_weir.util.foreign_files import read_regular

_MEDIA_TYPES = {
    ".safetensors": "application/octet-stream",
    ".gguf": "application/octet-stream",
    ".json": "application/json",
}


def mark_body(answer: str | Completion | Chunk, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the request of `Client.mark`."""
    if isinstance(answer, Chunk):
        answer = answer.result if answer.result is not None else answer.raw.id
    request_id = answer.id if isinstance(answer, Completion) else answer
    if not isinstance(request_id, str) or not request_id:
        raise WeirError(f"expected an answer or its id, got {brief(answer)!r}", "answer")
    dumps(metadata, "metadata")
    return {"id": request_id, "metadata": metadata}


class _Admin:
    """Part of a client; `call` sends an `HttpRequest` of these arguments and returns the response's JSON data."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call


class VectorAdmin(_Admin):
    """``client.vectors``: the vectors that the server stores by name, for ``Add("name", ...)``."""

    def put(self, name: str, vector: Any) -> Any:
        """Store a vector under a name, replacing an earlier one. Needs the admin key.

        Args:
            name: The name.
            vector: A tensor, array or list, [d_model] or [n, d_model], or of the width of other
                rows, say [d_head]; or the `Path` of a safetensors, GGUF or JSON file.

        Returns:
            The stored vector's digest and shape.
        """
        if isinstance(vector, Path):
            media_type = _MEDIA_TYPES.get(vector.suffix)
            if media_type is None:
                raise WeirError(f"expected a file ending in {', '.join(_MEDIA_TYPES)}, got {vector.name!r}", "vector")
            headers = {"Content-Type": media_type}
            content = read_regular(vector, "vector")
            return self._call("PUT", _path("/v1/vectors", name), content=content, headers=headers, admin=True)
        data = Vector.parse(vector, "vector", KEPT).to_json()
        return self._call("PUT", _path("/v1/vectors", name), json=data, admin=True)

    def get(self, name: str) -> Any:
        """Return the vector stored under a name."""
        return self._call("GET", _path("/v1/vectors", name))

    def delete(self, name: str) -> Any:
        """Delete a name. Needs the admin key."""
        return self._call("DELETE", _path("/v1/vectors", name), admin=True)

    def list(self) -> Any:
        """Return the stored vectors by name."""
        return self._call("GET", "/v1/vectors")


class SAEAdmin(_Admin):
    """``client.saes``: the sparse autoencoders on the server's workers, for ``SetFeature("name", ...)``."""

    def load(self, name: str, path: str, site: tuple[str, int] | None = None) -> Any:
        """Load an autoencoder under a name that is free. Needs the admin key.

        Args:
            name: The name.
            path: Of its files, on the server's disk.
            site: Hook point and block, for files that do not say them.

        Returns:
            Its hook point, layer, d_sae, architecture and bytes.
        """
        body = {"path": str(path)} | ({} if site is None else {"site": list(site)})
        return self._call("PUT", _path("/v1/saes", name), json=body, admin=True, repeatable=False)

    def unload(self, name: str) -> Any:
        """Unload an autoencoder. Needs the admin key."""
        return self._call("DELETE", _path("/v1/saes", name), admin=True)

    def get(self, name: str) -> Any:
        """Return one with its ``labels``, {feature: text}; JSON has the features as text."""
        return self._call("GET", _path("/v1/saes", name))

    def list(self) -> Any:
        """Return the loaded autoencoders."""
        return self._call("GET", "/v1/saes")


class HookAdmin(_Admin):
    """``client.hooks``: the functions that the server's operator has loaded, for ``hooks=Use("name", ...)``."""

    def list(self) -> Any:
        """Return the hooks that requests may name, with the args that they may replace."""
        return self._call("GET", "/v1/hooks")


class LensAdmin(_Admin):
    """``client.lenses``: the fitted lenses that the server's operator has named, for ``Lens(name=...)``."""

    def list(self) -> Any:
        """Return the lenses that requests may name, with their kind and blocks."""
        return self._call("GET", "/v1/lenses")


class ProbeAdmin(_Admin):
    """``client.probes``: the probes that the server keeps by name, for ``probes="name"`` and `When`."""

    def put(
        self,
        name: str,
        probe: Any,
        *,
        everyone: bool = False,
        alert: float | Sequence[float | None] | None = None,
        buckets: Sequence[float] | None = None,
    ) -> Any:
        """Keep a probe under a name, replacing an earlier one. Needs the admin key.

        Args:
            name: The name.
            probe: A `Probe`, `MLPProbe` or `AttentionProbe`, or its wire form; or the `Path` of a
                file that its `save` wrote.
            everyone: Whether it scores every request from now on; its scores go to the server's
                metrics.
            alert: A sequence with a score above this counts as an alert; a list for a probe with
                several outputs, None for those that do not count. With `everyone`.
            buckets: Upper bounds of the histogram of scores; with `everyone`.

        Returns:
            What the server keeps, without the weights.
        """
        settings = to_json_data({"everyone": everyone or None, "alert": alert, "buckets": buckets})
        given = {key: value for key, value in settings.items() if value is not None}
        parsed = load_probe(probe, name=name) if isinstance(probe, Path) else parse_probe(probe, "probe")
        body = {key: value for key, value in parsed.to_json().items() if key != "name"} | given
        return self._call("PUT", _path("/v1/probes", name), json=body, admin=True)

    def get(self, name: str) -> Any:
        """Return the probe kept under a name, with its weights."""
        return self._call("GET", _path("/v1/probes", name))

    def delete(self, name: str) -> Any:
        """Delete a name. Needs the admin key."""
        return self._call("DELETE", _path("/v1/probes", name), admin=True)

    def list(self) -> Any:
        """Return the probes that the server keeps, without their weights."""
        return self._call("GET", "/v1/probes")


class SteeringAdmin(_Admin):
    """``client.steering``: the steering of every request, and named modules."""

    def set(self, interventions: Any = None, *, replace: bool = False, **tiers: Any) -> Any:
        """Steer every request admitted from now on. Needs the admin key.

        Args:
            interventions: As for `weir.params`; they replace earlier ones.
            replace: Whether to remove all earlier steering, not only what this call replaces.
            tiers: ``vectors``, ``prefill_vectors`` and ``decode_vectors``: ``{hook: {layer:
                vector}}``, where a vector is a tensor, an array, a list or ``{"vector": ...,
                "scale": float}``; and any other field of the route.
        """
        body = _steering(interventions, tiers) | ({"replace": True} if replace else {})
        return self._call("POST", "/v1/steering/set", json=body, admin=True, repeatable=False)

    def clear(self) -> Any:
        """Remove all steering of every request. Needs the admin key."""
        return self._call("POST", "/v1/steering/clear", json={}, admin=True, repeatable=False)

    def get(self) -> Any:
        """Return the current steering of every request."""
        return self._call("GET", "/v1/steering")

    def register(self, name: str, interventions: Any = None, **tiers: Any) -> Any:
        """Store interventions under a name, for requests' ``modules``. Needs the admin key."""
        body = {"name": name} | _steering(interventions, tiers)
        return self._call("POST", "/v1/steering/modules/register", json=body, admin=True, repeatable=False)

    def unregister(self, name: str) -> Any:
        """Delete a module. Needs the admin key."""
        return self._call("POST", "/v1/steering/modules/unregister", json={"name": name}, admin=True, repeatable=False)

    def modules(self) -> Any:
        """Return the names of the modules."""
        return self._call("GET", "/v1/steering/modules")

    def layers(self) -> Any:
        """Return the hook points that can be steered, by block."""
        return self._call("GET", "/v1/steering/layers")


def to_json_data(value: Any) -> Any:
    """Return data that holds tensors and arrays as JSON data."""
    if isinstance(value, Mapping):
        return {str(name): to_json_data(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_data(inner) for inner in value]
    if hasattr(value, "detach"):  # a torch tensor, recognised without importing torch
        value = value.detach().cpu().float()
    return value.tolist() if hasattr(value, "tolist") else value


def _steering(interventions: Any, tiers: Mapping[str, Any]) -> dict[str, Any]:
    body = to_json_data(tiers)
    if interventions is not None:
        parsed = parse_interventions(interventions, "interventions")
        body["interventions"] = [intervention.to_json() for intervention in parsed]
    return body


def _path(prefix: str, name: str) -> str:
    if not isinstance(name, str) or not name:
        raise WeirError(f"expected a name, got {brief(name)!r}", "name")
    return f"{prefix}/{quote(name, safe='')}"
