"""Probes and arrays to JSON text and back, and linear probes of scikit-learn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.fields import is_json, loads
from vllm_weir.schema.vector_files import parse_safetensors
from vllm_weir.schema.vectors import Vector

METADATA = "weir_probe"
"""Key of the metadata under which a safetensors file has a probe's other fields, as JSON."""


def encode(plain: Mapping[str, Any], vectors: Mapping[str, Vector], path: str, form: str) -> bytes:
    """Return the contents of a file of a probe, in the form ``"safetensors"`` or ``"json"``.

    `plain` are the fields of the wire form that hold no vectors, with ``kind``; `vectors` the others.

    Raises:
        WeirError: naming a field under `path`, if one of the vectors is only a name.
    """
    for name, vector in vectors.items():
        if vector.array is None:
            raise WeirError("it names a registered vector; a file holds the numbers themselves", f"{path}.{name}")
    if form == "json":
        numbers = {name: vector.to_json() for name, vector in vectors.items()}
        return json.dumps({**plain, **numbers}, allow_nan=False).encode()
    from safetensors.numpy import save

    arrays = {name: np.ascontiguousarray(vector.array) for name, vector in vectors.items()}
    return save(arrays, {METADATA: json.dumps(plain, allow_nan=False)})


def decode(data: bytes, field: str) -> dict[str, Any]:
    """Return the fields of a probe: those that `encode` wrote, or the tensors of any safetensors file.

    Args:
        data: contents of the file.
        field: named by errors, followed by the place in the file.

    Raises:
        WeirError: for a file that is damaged or foreign.
    """
    found = loads(data, field) if is_json(data) else _safetensors(data, field)
    if not isinstance(found, dict):
        raise WeirError(f"a probe is an object, got {type(found).__name__}", field)
    return found


def _safetensors(data: bytes, field: str) -> dict[str, Any]:
    """Return the tensors of a file, and the fields in its metadata."""
    tensors, metadata = parse_safetensors(data, field)
    text = metadata.get(METADATA)
    found = {} if text is None else loads(text, f"{field}.{METADATA}")
    if not isinstance(found, dict):
        raise WeirError(f"expected an object, got {type(found).__name__}", f"{field}.{METADATA}")
    return {**found, **tensors}


CLASSIFIERS = ("LogisticRegression", "LinearSVC", "RidgeClassifier", "SGDClassifier")
REGRESSORS = ("LinearRegression", "Ridge")


class LinearMap(NamedTuple):
    """What an estimator computes from a row x: ``activation(weight @ x + bias)``.

    Attributes:
        weight: float64 [k, d].
        bias: float64 [k].
        activation: of a `Probe`.
    """

    weight: np.ndarray
    bias: np.ndarray
    activation: str


def linear_map(estimator: Any, field: str) -> LinearMap:
    """Return what a fitted estimator, or a pipeline that ends in one, computes.

    Raises:
        WeirError: if it is not fitted, of another kind, or not linear.
    """
    steps = [step for _, step in estimator.steps] if _is(estimator, "Pipeline") else [estimator]
    *before, last = [step for step in steps if step is not None and step != "passthrough"] or [None]
    try:
        found = _final(last, field)
        weight, bias = found.weight, found.bias
        for step in reversed(before):
            weight, bias = _fold(step, weight, bias, field)
    except AttributeError as e:
        raise WeirError(f"it is not fitted: {str(e)[:120]}", field) from None
    return LinearMap(weight, bias, found.activation)


def _is(estimator: Any, *names: str) -> bool:
    return any(cls.__name__ in names for cls in type(estimator).__mro__)


def _final(estimator: Any, field: str) -> LinearMap:
    if not _is(estimator, *CLASSIFIERS, *REGRESSORS):
        raise WeirError(
            f"{type(estimator).__name__} is no linear estimator that is known here; choose from "
            f"{', '.join((*CLASSIFIERS, *REGRESSORS))}, or give weight and bias to weir.Probe",
            field,
        )
    weight = np.atleast_2d(np.asarray(estimator.coef_, np.float64))
    bias = np.broadcast_to(np.asarray(estimator.intercept_, np.float64), (len(weight),))
    if _is(estimator, "LogisticRegression"):
        return _logistic(estimator, weight, bias)
    if _is(estimator, "SGDClassifier") and len(weight) == 1 and estimator.get_params().get("loss") == "log_loss":
        return LinearMap(weight, bias, "sigmoid")
    return LinearMap(weight, bias, "none")


def _logistic(estimator: Any, weight: np.ndarray, bias: np.ndarray) -> LinearMap:
    """Return a logistic regression's map, with the activation that gives its probabilities."""
    params = estimator.get_params()
    scheme = params.get("multi_class", "auto")
    if len(weight) == 1:
        # Asked to treat two classes as several, it takes the softmax of (-s, s).
        factor = 2.0 if scheme == "multinomial" else 1.0
        return LinearMap(factor * weight, factor * bias, "sigmoid")
    # One class against the rest: its probabilities are normalised sigmoids, which no activation gives.
    one_against_rest = scheme == "ovr" or params.get("solver") == "liblinear"
    return LinearMap(weight, bias, "none" if one_against_rest else "softmax")


def _fold(step: Any, weight: np.ndarray, bias: np.ndarray, field: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the map of what comes after a transformer, for what goes into it."""
    fold = next((fold for name, fold in _FOLDS.items() if _is(step, name)), None)
    if fold is None:
        raise WeirError(
            f"{type(step).__name__} cannot be folded into a linear probe; {', '.join(_FOLDS)} can", f"{field}.steps"
        )
    return fold(step, weight, bias, field)


def _fold_standard(step: Any, weight: np.ndarray, bias: np.ndarray, _field: str) -> tuple[np.ndarray, np.ndarray]:
    # x -> (x - mean) / scale, each of which may be left out; the mean is there even if it is not subtracted.
    if step.scale_ is not None:
        weight = weight / step.scale_
    centred = step.get_params().get("with_mean", True)
    return weight, bias - weight @ step.mean_ if centred else bias


def _fold_min_max(step: Any, weight: np.ndarray, bias: np.ndarray, field: str) -> tuple[np.ndarray, np.ndarray]:
    # x -> x * scale + min
    if step.get_params().get("clip"):
        raise WeirError("a MinMaxScaler that clips is not linear; fit it with clip=False", f"{field}.steps")
    return weight * step.scale_, bias + weight @ step.min_


def _fold_pca(step: Any, weight: np.ndarray, bias: np.ndarray, _field: str) -> tuple[np.ndarray, np.ndarray]:
    # x -> components @ (x - mean), each divided by its standard deviation if it whitens.
    if step.get_params().get("whiten"):
        deviation = np.sqrt(step.explained_variance_)
        weight = weight / np.maximum(deviation, np.finfo(deviation.dtype).eps)
    weight = weight @ step.components_
    return weight, bias - weight @ step.mean_


_FOLDS: dict[str, Callable[[Any, np.ndarray, np.ndarray, str], tuple[np.ndarray, np.ndarray]]] = {
    "StandardScaler": _fold_standard,
    "MinMaxScaler": _fold_min_max,
    "PCA": _fold_pca,
}
