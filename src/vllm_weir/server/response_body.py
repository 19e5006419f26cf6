"""The JSON object ``weir`` of a choice: a sequence's receipt, and its rows or scores."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.frontend.outputs.view import OutputView
from vllm_weir.results.activations import Activations
from vllm_weir.results.read_outs import LensReadings, by_block, each_lens
from vllm_weir.results.scores import Scores
from vllm_weir.schema.hooks import Site


class ValueForm(NamedTuple):
    """How the values of hooks come in an answer."""

    binary: bool  # as ``{"b64", "dtype", "shape"}`` instead of numbers
    most: int  # bytes that they, and what is saved, may have

    def told(self, view: OutputView) -> dict[str, Any]:
        """Return the values, and what is saved, of a finished sequence, as `values` does."""
        saved = view.saved()
        if not saved:
            return self.values(view)
        if too_large := self._too_large(sum(map(_size, saved.values()))):
            return too_large
        return {"saved": {name: _plain(value) for name, value in saved.items()}} | self.values(view)

    def values(self, view: OutputView) -> dict[str, Any]:
        """Return the values of a view by name, with their positions; waits for them. One that is not finite is null.

        If they are too large, ``values_error`` says so in their place.
        """
        found = view.values()
        if not found:
            return {}
        if too_large := self._too_large(sum(one.nbytes for one in found.values())):
            return too_large
        given = {
            name: {"positions": found.positions[name].tolist()}
            | (_packed(one) if self.binary else {"values": floats(one)})
            for name, one in found.items()
        }
        return {"values": given}

    def _too_large(self, size: int) -> dict[str, str]:
        if size <= self.most:
            return {}
        why = (
            f"{size} bytes of what hooks gave exceed the {self.most} that an answer may carry "
            "(WEIR_SERVE_INLINE_BYTES); give fewer numbers, or name fewer positions or layers"
        )
        return {"values_error": why}


NUMBERS = ValueForm(False, 8 << 20)


def floats(rows: torch.Tensor) -> list[Any]:
    """Return rows as nested lists, with null for what is not finite."""
    values = rows.float().tolist()
    return values if bool(torch.isfinite(rows).all()) else _finite(values)


def _finite(values: Any) -> Any:
    if isinstance(values, list):
        return [_finite(v) for v in values]
    return values if math.isfinite(values) else None


def _packed(tensor: torch.Tensor) -> dict[str, Any]:
    data = base64.b64encode(tensor.contiguous().numpy().tobytes()).decode("ascii")
    return {"b64": data, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _plain(value: Any) -> Any:
    """Return what was saved as JSON data: tensors packed, bytes as ``{"b64"}``, null for what is not finite."""
    if isinstance(value, torch.Tensor):
        return _packed(value)
    if isinstance(value, bytes):
        return {"b64": base64.b64encode(value).decode("ascii")}
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, (bytes, str)):
        return len(value)
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 8 + sum(map(_size, inner))


ROUTED = "routed_experts"
"""vLLM's own field of a choice, into which an entry of that name is moved."""
NO_LOCK: AbstractContextManager = nullcontext()
Spool = Callable[[Activations, int], dict[str, Any]]
"""Stores rows of so many bytes and returns {"id", "url", "expires_in"}; may raise WeirError."""


def whole(view: OutputView) -> OutputView:
    """Return the view of all of the sequence's rows, even if the output carries only new ones."""
    return view if view.start == 0 else view.with_start(0)


def weir_object(
    view: OutputView,
    inline_bytes: int,
    spool: Spool,
    rows: bool = True,
    cpu_lock: AbstractContextManager = NO_LOCK,
    value_form: ValueForm = NUMBERS,
) -> dict[str, Any]:
    """Return the object of one finished sequence; waits for its rows.

    Args:
        view: All of its rows; see `whole`.
        inline_bytes: Rows of at most this many bytes are inline; larger ones are given to `spool`.
        spool: Stores rows to be fetched.
        rows: Whether to include rows; False if the response carries them in another form.
        cpu_lock: Held while the object is built, but neither while waiting nor while `spool` runs.

    Raises:
        WeirError: If rows were lost.
    """
    view.wait()
    with cpu_lock:
        out: dict[str, Any] = {"receipt": view.receipt().to_dict(), **read_values(view)}
        out |= value_form.told(view)
        if (routing := view.routing()) is not None:
            out[ROUTED] = npy(routing.ids)
            if routing.weights is not None:
                out["routing_weights"] = npy(routing.weights)
        acts = view.activations()
        found = (projected(acts) if projects(view) else {}) | probe_scores(view)
        if found:
            out["scores"] = found
        if projects(view) or not rows or not acts.sites:
            return out
        size, data = _inline(acts, inline_bytes)
    activations = out["activations"] = {
        "sites": [name(site) for site in acts.sites],
        "format": "safetensors",
        "bytes": size,
    }
    if data is not None:
        activations["b64"] = base64.b64encode(data).decode("ascii")
        return out
    try:
        activations |= spool(acts, size)
    except WeirError as e:
        activations["error"] = e.message
    return out


def npy(array: np.ndarray) -> str:
    """Return the base64 of an .npy file, as vLLM writes arrays."""
    with io.BytesIO() as file:
        np.save(file, array, allow_pickle=False)
        return base64.b64encode(file.getbuffer()).decode("ascii")


def projects(view: OutputView) -> bool:
    """Return whether the sequence's captures yield scores instead of rows."""
    postprocess = view.part.spec.postprocess
    return bool(view.part.spec.site_requests) and postprocess is not None and bool(postprocess.directions)


def new_values(view: OutputView, start: int, scored_start: int, value_form: ValueForm = NUMBERS) -> dict[str, Any]:
    """Return the scores, features, lens and values of hooks at positions from `start` on; waits for them.

    `view` is of all rows so far; probes' scores begin at `scored_start`.
    """
    later = view.with_start(start, scored_start=scored_start)
    found = (new_projected(view, start) if projects(view) else {}) | probe_scores(later)
    return ({"scores": found} if found else {}) | read_values(later) | value_form.values(later)


def probe_scores(view: OutputView) -> dict[str, Any]:
    """Return the scores of probes by name, waiting for them; null for one that is not finite.

    None of those without rows.
    """
    found = view.scores() or Scores({}, {})
    return {
        name: {"positions": found.positions[name].tolist(), "values": floats(values)}
        for name, values in found.items()
        if len(values)
    }


def read_values(view: OutputView) -> dict[str, Any]:
    """Return features by name, and the lens by block, of several each by label; null for a value that is not finite.

    Those without rows are left out. Features of a cross-layer transcoder are by block under its name.
    """
    if not view.part.read_outs:
        return {}
    values = view.read_values()
    features: dict[str, Any] = {}
    for (name, layer), one in by_block(values.features).items():
        if len(one):
            own = {"positions": one.positions.tolist(), "ids": one.ids.tolist(), "values": floats(one.values)}
            features |= {name: own if layer is None else features.get(name, {}) | {str(layer): own}}
    found = {label: lens for label, one in each_lens(values.lens).items() if (lens := _lens(one))}
    lens = found.get("", {}) if isinstance(values.lens, LensReadings) else found
    return ({"features": features} if features else {}) | ({"lens": lens} if lens else {})


def _lens(readings: LensReadings) -> dict[str, Any]:
    """Return what one lens has read by block, with rows."""
    return {
        str(layer): {
            "positions": one.positions.tolist(),
            "token_ids": one.token_ids.tolist(),
            "logprobs": floats(one.logprobs),
        }
        for layer, one in readings.items()
        if len(one)
    }


def new_projected(view: OutputView, start: int) -> dict[str, Any]:
    """Return the products at positions from `start` on, empty if there are none; waits for them."""
    acts = view.with_start(start).activations()
    return projected(acts) if any(acts.count(site) for site in acts.sites) else {}


def projected(acts: Activations) -> dict[str, Any]:
    """Return products with directions by site, with positions and tokens; one that is not finite is null."""
    out: dict[str, Any] = {"sites": {name(site): floats(acts[site]) for site in acts.sites}}
    try:
        return {"positions": acts.positions.tolist(), "token_ids": acts.token_ids.tolist(), **out}
    except WeirError:  # the sites have different positions
        out["positions_of"] = {name(s): acts.positions_of(*s).tolist() for s in acts.sites}
        out["token_ids_of"] = {name(s): acts.token_ids_of(*s).tolist() for s in acts.sites}
        return out


def name(site: Site) -> str:
    return f"{site.hook}.{site.layer}"


def size_of(acts: Activations) -> int:
    return sum(acts[site].nbytes for site in acts.sites)


def _inline(acts: Activations, inline_bytes: int) -> tuple[int, bytes | None]:
    """Return the size in bytes, and the file's bytes if they are to be inline."""
    size = size_of(acts)
    if size > inline_bytes:
        return size, None
    data = acts.to_bytes()
    return len(data), data if len(data) <= inline_bytes else None
