"""What the fields of a response's ``weir`` object hold: receipts, values of all kinds, and activations."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import io
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from vllm_weir.errors import WeirError, brief
from vllm_weir.results.activations import Activations
from vllm_weir.results.read_outs import FeatureValues, Lenses, LensReadings, LensTokens, nested
from vllm_weir.results.receipt import InterventionReceipt, Receipt
from vllm_weir.results.scores import HookValues, Scores
from vllm_weir.results.site_slices import Stacked
from vllm_weir.schema.hooks import Site, parse_site
from vllm_weir.schema.keys import PROJECTED_KEYS


def site_of(name: str) -> Site:
    """Return the site that a response calls ``"resid_post.10"``."""
    try:
        return parse_site(name)
    except WeirError:
        raise WeirError(f"the server named an unknown site {brief(name)!r}; is it another version of Weir?") from None


_RECEIPT_FIELDS = {field.name for field in dataclasses.fields(Receipt)}


def receipt_of(data: Mapping[str, Any]) -> Receipt:
    """Return the receipt that `Receipt.to_dict` wrote; fields of a later version are left out."""
    fields = {name: value for name, value in data.items() if name in _RECEIPT_FIELDS}
    for name in ("captured", "dropped"):
        fields[name] = _site_counts(fields.get(name, {}))
    fields["steered"] = tuple(_site_counts(counts) for counts in fields.get("steered", ()))
    for name in ("shared", "files", "gates", "notes"):
        fields[name] = tuple(fields.get(name, ()))
    fields["interventions"] = tuple(map(InterventionReceipt.from_dict, fields.get("interventions", ())))
    return Receipt(**fields)


def _site_counts(data: Mapping[str, int]) -> dict[Site, int]:
    return {site_of(name): count for name, count in data.items()}


def projected_of(data: Mapping[str, Any]) -> Activations:
    """Return a response's ``scores`` by site as rows, float32 [rows, m]; null (not finite) becomes NaN.

    Scores of heads are [rows, heads, m].
    """
    rows = {site_of(name): values for name, values in data["sites"].items()}

    def per_site(name: str) -> dict[Site, torch.Tensor]:
        by_site = data.get(f"{name}_of")
        if by_site is not None:
            return {site_of(site): torch.tensor(values, dtype=torch.int64) for site, values in by_site.items()}
        return dict.fromkeys(rows, torch.tensor(data[name], dtype=torch.int64))

    matrices = {site: _matrix(values) for site, values in rows.items()}
    return Activations(matrices, per_site("positions"), per_site("token_ids"))


def probe_scores_of(data: Mapping[str, Any]) -> Scores | None:
    """Return the probes' part of a response's ``scores``, None if it has none; null becomes NaN."""
    probes = {name: one for name, one in data.items() if name not in PROJECTED_KEYS}
    if not probes:
        return None
    return Scores(
        {name: _matrix(one["values"]) for name, one in probes.items()},
        {name: _ints(one["positions"]) for name, one in probes.items()},
    )


def features_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response's ``features``, of a cross-layer transcoder by block; null (not finite) becomes NaN."""
    found: dict[tuple[str, int | None], FeatureValues] = {}
    for name, one in data.items():
        several = {None: one} if "positions" in one else {int(layer): own for layer, own in one.items()}
        for layer, own in several.items():
            values = FeatureValues(_ints(own["positions"]), _ints(own["ids"]), _matrix(own["values"]))
            found[name, layer] = values
    return nested(found)


def lens_of(data: Mapping[str, Any]) -> Lenses:
    """Return a response's ``lens``; null (not finite) becomes NaN."""
    if data and all("positions" not in one for one in data.values()):
        return {label: _readings_of(one) for label, one in data.items()}
    return _readings_of(data)


def _readings_of(data: Mapping[str, Any]) -> LensReadings:
    return LensReadings(
        (int(layer), LensTokens(_ints(one["positions"]), _ints(one["token_ids"]), _matrix(one["logprobs"])))
        for layer, one in data.items()
    )


def hook_values_of(data: Mapping[str, Any]) -> HookValues | None:
    """Return a response's ``values``, None if it has none; null (not finite) becomes NaN."""
    if not data:
        return None
    return HookValues(
        {name: _tensor(one) if "b64" in one else _matrix(one["values"]) for name, one in data.items()},
        {name: _ints(one["positions"]) for name, one in data.items()},
    )


def saved_of(value: Any) -> Any:
    """Return what a response's ``saved`` holds, with tensors and bytes for base64."""
    if isinstance(value, dict):
        if "b64" in value and value.keys() <= {"b64", "dtype", "shape"}:
            return _tensor(value) if "dtype" in value else base64.b64decode(value["b64"])
        return {key: saved_of(one) for key, one in value.items()}
    return [saved_of(one) for one in value] if isinstance(value, list) else value


def _tensor(packed: Mapping[str, Any]) -> torch.Tensor:
    try:
        data = bytearray(base64.b64decode(packed["b64"], validate=True))
        dtype = getattr(torch, packed["dtype"])
        return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(packed["shape"])
    except (binascii.Error, AttributeError, TypeError, ValueError, RuntimeError, KeyError) as e:
        raise WeirError(f"the values that the server sent cannot be read: {e}") from None


def _ints(values: list[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _matrix(values: list[Any]) -> torch.Tensor:
    if not values:
        return torch.empty(0, 0)
    return torch.tensor(_numbers(values), dtype=torch.float32)


def _numbers(values: Any) -> Any:
    """Return nested lists of numbers with NaN for null."""
    if isinstance(values, list):
        return [_numbers(v) for v in values]
    return math.nan if values is None else values


def array_of(npy: str | None) -> np.ndarray | None:
    """Return the array in the base64 of an .npy file; None for None."""
    if npy is None:
        return None
    try:
        array: np.ndarray = np.load(io.BytesIO(base64.b64decode(npy, validate=True)), allow_pickle=False)
    except (binascii.Error, TypeError, ValueError, EOFError) as e:
        raise WeirError(f"the routing that the server sent cannot be read: {e}") from None
    return array


def activations_of(data: bytes) -> Activations:
    """Return the activations that `Activations.save` wrote; raise WeirError for other bytes."""
    try:
        end = 8 + int.from_bytes(data[:8], "little")
        meta = json.loads(data[8:end]).get("__metadata__", {})
        if meta.get("weir") != "1":
            raise WeirError("the server sent a file that is not one of activations")
        tensors = load_tensors(data)
        sites = [Site(hook, layer) for hook, layer in json.loads(meta["sites"])]
        rows, positions, token_ids = (
            {s: tensors[f"{s.hook}.{s.layer}{part}"] for s in sites} for part in ("", ".positions", ".token_ids")
        )
        return Activations(rows, positions, token_ids, stacked=Stacked.from_metadata(meta))
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as e:
        if isinstance(e, WeirError):
            raise
        raise WeirError(f"the activations that the server sent cannot be read: {e}") from None
