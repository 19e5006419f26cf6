"""`Directions`: one direction for each of some blocks, and how well each separates two classes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from vllm_weir.errors import StoreError, WeirError, brief
from vllm_weir.experiments.vectors import codec
from vllm_weir.schema.fields import is_int, plain, set_fields
from vllm_weir.schema.hooks import normalise_hook
from vllm_weir.schema.interventions import Add
from vllm_weir.schema.probes import Probe
from vllm_weir.schema.rows import RowPart
from vllm_weir.schema.vectors import Vector, number
from vllm_weir.util import notebook
from vllm_weir.util.atomic_write import atomic_write

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Directions:
    """Directions by block, as `fit` finds them and `load_vector` reads them.

    Args:
        hook: hook point whose rows the directions are directions of.
        layers: the blocks, counted from 0, ascending; left out or empty: those of `vectors`.
        vectors: ``{layer: vector}``, each [d], all of one width; kept as read-only float32.
        method: how they were found: ``"diff"``, ``"pca"``, ``"lat"``, ``"logistic"``, or the format
            of the file that they were read from.
        convention: one sentence on the layer numbers and the scale of the method or the file, and
            how they became blocks and hook points.
        auc_by_layer: ``{layer: AUC}`` on pairs that were held out; None if it is not known.
        bias: ``{layer: bias}`` of the probes; None if it is not known. A probe's score is
            ``weight @ row + bias``, where `weight` is the vector itself for ``"logistic"``, and the
            unit vector along it for every other method.
        details: anything more, as JSON: counts, effects, doses.
        head: of which head rows are, at hook points with a row for each; None: of whole rows.

    Raises:
        WeirError: naming the field.
    """

    hook: str = "resid_post"
    layers: tuple[int, ...] = ()
    vectors: Mapping[int, Any] = field(default_factory=dict, repr=False)
    method: str = "unknown"
    convention: str = ""
    auc_by_layer: Mapping[int, float] | None = None
    bias: Mapping[int, float] | None = None
    details: Mapping[str, Any] = field(default_factory=dict, repr=False)
    head: int | None = None

    def __post_init__(self) -> None:
        vectors = _parse_vectors(self.vectors)
        layers = tuple(sorted(int(layer) for layer in self.layers)) or tuple(vectors)
        if layers != tuple(vectors):
            raise WeirError(f"layers {list(layers)}, but vectors for {list(vectors)}", "directions.layers")
        for name in ("method", "convention"):
            if not isinstance(getattr(self, name), str):
                raise WeirError(f"expected a text, got {type(getattr(self, name)).__name__}", f"directions.{name}")
        set_fields(
            self,
            hook=normalise_hook(self.hook, "directions.hook"),
            layers=layers,
            vectors=vectors,
            auc_by_layer=_parse_numbers(self.auc_by_layer, layers, "directions.auc_by_layer"),
            bias=_parse_numbers(self.bias, layers, "directions.bias"),
            details=_parse_details(self.details),
            head=_parse_head(self.hook, self.head),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Directions):
            return NotImplemented
        return self._plain() == other._plain() and all(
            np.array_equal(vector, other.vectors[layer]) for layer, vector in self.vectors.items()
        )

    __hash__ = None  # type: ignore[assignment]

    def _plain(self) -> tuple[Any, ...]:
        names = ("hook", "layers", "method", "convention", "auc_by_layer", "bias", "details", "head")
        return tuple(getattr(self, name) for name in names)

    @property
    def _place(self) -> str:
        return self.hook if self.head is None else f"{self.hook}, head {self.head}"

    @property
    def width(self) -> int:
        """The number of values of each vector."""
        return len(self.vectors[self.layers[0]])

    def vector(self, layer: int) -> torch.Tensor:
        """Return the direction of a block as float32 [d]; raise WeirError if there is none."""
        import torch

        return torch.from_numpy(self._array(layer).copy())

    def auc(self, layer: int) -> float:
        """Return the AUC of a block on held-out pairs; raise WeirError if it is not known."""
        if self.auc_by_layer is None:
            raise WeirError("its AUC is not known: it comes from weir.fit, which holds pairs out", "auc_by_layer")
        return self.auc_by_layer[self._known(layer, self.auc_by_layer)]

    @property
    def best(self) -> int:
        """The block with the highest AUC, the first of several; WeirError if no AUC is known."""
        if not self.auc_by_layer:
            raise WeirError("no AUC is known, so no block is the best; choose one of .layers", "auc_by_layer")
        by_layer = self.auc_by_layer
        return max(sorted(by_layer), key=lambda layer: by_layer[layer])

    def probe(self, layer: int | None = None, name: str = "probe", **fields: Any) -> Probe:
        """Return the probe that scores rows by the direction of a block.

        Of logistic directions the score is the fitted log odds; of others, the component of the row
        along the direction, less the middle between the means of the two classes.

        Args:
            layer: the block; left out, it is `best`, or the only one.
            name: of the probe.
            **fields: other fields of `Probe`. `bias` has to be given where none is known.

        Raises:
            WeirError: for a block without a direction, or if no bias is known and none is given.
        """
        layer = self._chosen(layer)
        vector = self._array(layer)
        if "bias" not in fields:
            if self.bias is None or layer not in self.bias:
                raise WeirError(
                    "no bias is known, so no score separates the classes; give bias=, 0 for the component alone", "bias"
                )
            fields["bias"] = self.bias[layer]
        weight = vector if self.method == "logistic" else unit(vector)
        return Probe(name, weight, hook=self.hook, layer=layer, **{"head": self.head} | fields)

    def add(self, scale: float = 1.0, layers: int | Iterable[int] | None = None, **fields: Any) -> Add:
        """Return the intervention that adds ``scale * vector`` at each block.

        Args:
            scale: strength, a factor; a vector keeps the length that it has.
            layers: one block or several; left out: all that there are.
            **fields: other fields of `Add`.

        Raises:
            WeirError: for a block without a direction.
        """
        chosen = self.only(layers) if layers is not None else self
        heads = None if self.head is None else [self.head]
        return Add(dict(chosen.vectors), scale=scale, hook=self.hook, **{"heads": heads} | fields)

    def only(self, layers: int | Iterable[int]) -> Directions:
        """Return the directions of one block or several, with what is known about them."""
        given = plain(layers)
        wanted = sorted(
            {self._known(layer, self.vectors) for layer in (given if isinstance(given, Iterable) else [given])}
        )

        def part(values: Mapping[int, Any] | None) -> dict[int, Any] | None:
            return None if values is None else {layer: values[layer] for layer in wanted if layer in values}

        return replace(
            self, layers=tuple(wanted), vectors=part(self.vectors) or {}, auc_by_layer=part(self.auc_by_layer),
            bias=part(self.bias),
        )  # fmt: skip

    @overload
    def plot(self, path: None = None) -> Figure: ...

    @overload
    def plot(self, path: str | os.PathLike) -> Path: ...

    def plot(self, path: str | os.PathLike | None = None) -> Figure | Path:
        """Draw the AUC on held-out prompts by block.

        Args:
            path: None to get the figure, which a notebook shows; or ``.png``, ``.svg`` or ``.html``.

        Returns:
            Without a path a ``matplotlib.figure.Figure``, with one the path.

        Raises:
            WeirError: if no AUC is known, for another ending, without matplotlib, or if the file
                cannot be written.
        """
        from vllm_weir.experiments.plots import draw_auc

        if not self.auc_by_layer:
            raise WeirError("no AUC is known: nothing was held out", "plot")
        return draw_auc(self.auc_by_layer, self.best, f"{self.method} at {self._place}: AUC by block", path)

    def __repr__(self) -> str:
        blocks = f"{len(self.layers)} blocks" if len(self.layers) > 1 else f"block {self.layers[0]}"
        best = f", best at block {self.best}: AUC {self.auc(self.best):.3f}" if self.auc_by_layer else ""
        return f"Directions({self.method} at {self._place}, vector[{self.width}] of {blocks}{best})"

    def __str__(self) -> str:
        head, *rows = self._table()
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = ["  ".join(cell.rjust(n) for cell, n in zip(line, widths, strict=True)) for line in (head, *rows)]
        return "\n".join([repr(self), *lines])

    def _repr_html_(self) -> str:
        head, *rows = self._table()
        areas = self.auc_by_layer or {}
        scale = notebook.Scale(min(0.5, *areas.values(), 0.5), 1.0)
        styles = [
            [scale.css(areas[layer]) if name == "AUC" and layer in areas else "" for name in head]
            for layer in self.layers
        ]
        return notebook.result(repr(self), notebook.table(head, rows, styles))

    def _table(self) -> list[list[str]]:
        columns: dict[str, Mapping[int, float]] = {"AUC": self.auc_by_layer or {}, "bias": self.bias or {}}
        known = {name: values for name, values in columns.items() if values}
        head = ["block", *known, "length"]
        return [head] + [
            [str(layer), *(f"{x[layer]:.3f}" if layer in x else "" for x in known.values()), f"{_length(vector):.4g}"]
            for layer, vector in self.vectors.items()
        ]

    def save(self, path: str | os.PathLike, model_hint: str = "") -> None:
        """Write a file that `load_vector` reads back to the bit, with all that is known.

        Args:
            path: its name ends in ``.safetensors``, or in ``.gguf`` for a control vector that
                llama.cpp and repeng read. A control vector has directions of `resid_post` only, and
                in it no other program than Weir sees the direction of block 0.
            model_hint: of a control vector, the kind of model, such as ``"llama"``, which only
                informs; left out, it is what `details` say as ``model_type``.

        Raises:
            WeirError: for another ending, or a hook point that the format does not have.
            StoreError: if the file cannot be written.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise WeirError(f"expected the path of a file, got {type(path).__name__}", "path")
        ending, known = Path(path).suffix.lower(), {name: getattr(self, name) for name in codec.KNOWN}
        if ending == ".gguf":
            data = codec.to_gguf(self.vectors, known, model_hint or self._model_type)
        elif ending == ".safetensors":
            data = codec.to_safetensors(self.vectors, known)
        else:
            raise WeirError("expected a name that ends in .gguf or .safetensors", "path")
        try:
            with atomic_write(path) as file:
                file.write(data)
        except (OSError, ValueError) as e:
            raise StoreError(f"cannot write {brief(path, 200)}: {str(e)[:80]}", "path") from None

    def to_repeng(self, model_type: str = "") -> Any:
        """Return the ``ControlVector`` of repeng, whose layers are blocks counted from 0, too.

        Args:
            model_type: what repeng knows the model by, such as ``"qwen3"``; left out, it is what
                `details` say as ``model_type``.

        Raises:
            WeirError: for another hook point than `resid_post`, or if repeng cannot be imported.
        """
        if self.hook != "resid_post":
            raise WeirError(f"repeng adds to what leaves a block, resid_post, not to {self.hook}", "hook")
        try:
            from repeng import ControlVector
        except ImportError as e:
            raise WeirError(f"repeng is needed: pip install repeng ({e})", "to_repeng") from None
        except AttributeError as e:
            raise WeirError(
                f"this repeng does not work with the installed numpy ({str(e)[:80]})", "to_repeng"
            ) from None
        directions = {layer: vector.copy() for layer, vector in self.vectors.items()}
        return ControlVector(model_type=model_type or self._model_type, directions=directions)

    @property
    def _model_type(self) -> str:
        return str(self.details.get("model_type", "unknown"))

    def _chosen(self, layer: int | None) -> int:
        if layer is not None:
            return self._known(layer, self.vectors)
        return self.layers[0] if len(self.layers) == 1 else self.best

    def _array(self, layer: int) -> np.ndarray:
        return self.vectors[self._known(layer, self.vectors)]

    def _known(self, layer: Any, values: Mapping[int, Any]) -> int:
        layer = plain(layer)
        if not is_int(layer) or int(layer) not in values:
            raise WeirError(f"there is nothing for block {brief(layer)}, only for {brief(list(values), 200)}", "layer")
        return int(layer)


def _length(vector: np.ndarray) -> float:
    return float(np.linalg.norm(vector.astype(np.float64)))


def unit(vector: np.ndarray) -> np.ndarray:
    """Return the float32 unit vector along a vector, computed in float64; raise WeirError if its length is zero."""
    exact = vector.astype(np.float64)
    length = _length(vector)
    if length == 0:
        raise WeirError("a direction of length zero points nowhere", "vectors")
    return (exact / length).astype(np.float32)


def _parse_vectors(values: Any) -> dict[int, np.ndarray]:
    if not isinstance(values, Mapping) or not values:
        raise WeirError("expected {layer: vector} with at least one block", "directions.vectors")
    out: dict[int, np.ndarray] = {}
    for key, value in values.items():
        at = f"directions.vectors.{brief(key)}"
        layer = plain(key)
        if not is_int(layer) or layer < 0:
            raise WeirError("a layer is the index of a block, counted from 0", at)
        vector = Vector.parse_one(value, at)
        if vector.array is None:
            raise WeirError("expected numbers, got a name", at)
        out[int(layer)] = vector.array
    widths = sorted({len(array) for array in out.values()})
    if len(widths) > 1:
        raise WeirError(f"the vectors differ in width: {widths[:5]}", "directions.vectors")
    return dict(sorted(out.items()))


def _parse_numbers(values: Any, layers: tuple[int, ...], at: str) -> dict[int, float] | None:
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise WeirError("expected {layer: number}", at)
    out = {int(layer): number(value, f"{at}.{brief(layer)}") for layer, value in values.items()}
    if not set(out) <= set(layers):
        raise WeirError(f"blocks {sorted(set(out) - set(layers))[:5]} have no vector", at)
    return dict(sorted(out.items()))


def _parse_head(hook: str, head: Any) -> int | None:
    if head is None:
        return None
    if not is_int(plain(head)):
        raise WeirError(f"expected the number of a head, got {brief(head)}", "directions.head")
    return (RowPart.parse(normalise_hook(hook, "directions.hook"), head, None, "directions").heads or (0,))[0]


def _parse_details(details: Any) -> dict[str, Any]:
    if not isinstance(details, Mapping):
        raise WeirError(f"expected an object, got {type(details).__name__}", "directions.details")
    try:
        out = json.loads(json.dumps(dict(details), allow_nan=False))
    except (TypeError, ValueError) as e:
        raise WeirError(f"has to be JSON: {str(e)[:80]}", "directions.details") from None
    return out
