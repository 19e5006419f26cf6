"""Lenses on the device: the model's own final norm and unembedding, and the translators of tuned lenses."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_weir.errors import WeirError
from vllm_weir.schema.read_outs import ReadOut
from vllm_weir.util.foreign_files import load_torch, read_regular
from vllm_weir.util.top import as_records, top_logprobs

MAX_LOGITS = 1 << 25
"""Logits that are computed at once. Fewer would read the unembedding's weights more often than its
products take."""
MAX_TUNED = 4
"""Tuned lenses that are kept ready."""
Translator = tuple[torch.Tensor, torch.Tensor]
"""(A [d_model, d_model], b [d_model]), float32: a row h becomes h + (A h + b)."""
_Version = tuple[str, int, int]
"""A directory, and when its translators were written and how long they are."""


@dataclass(frozen=True)
class Unembedding:
    """How the model turns rows of the stream into next-token logits.

    Attributes:
        logits: rows [n, d_model] after the last block -> logits [n, vocabulary]; None if no lens
            is served.
        vocabulary: how many logits a row has.
        refused: why no lens is served; "" if it is.
    """

    logits: Callable[[torch.Tensor], torch.Tensor] | None = None
    vocabulary: int = 0
    refused: str = "no lens is served: the model's unembedding was not found"


@dataclass(frozen=True, eq=False)
class LensReader:
    """Reads the likeliest next tokens off rows of the stream.

    Attributes:
        unembedding: the model's.
        width: values of a row.
        top_k: how many tokens.
        translator: of a tuned lens, at this block; None for none.
    """

    unembedding: Unembedding
    width: int
    top_k: int
    translator: Translator | None = None

    @property
    def group(self) -> object:
        """Rows of all blocks that are not translated are read together."""
        return self if self.translator is not None else (id(self.unembedding), self.top_k)

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the records of rows [n, width], int32 [n, 2 top_k]."""
        size = max(1, MAX_LOGITS // max(1, self.unembedding.vocabulary))
        return torch.cat([self._records(some) for some in rows.split(size)])

    def _records(self, rows: torch.Tensor) -> torch.Tensor:
        if self.translator is not None:
            matrix, bias = self.translator
            whole = rows.float()
            rows = (whole + (whole @ matrix.T + bias)).to(rows.dtype)
        assert self.unembedding.logits is not None
        return as_records(*top_logprobs(self.unembedding.logits(rows), self.top_k))


class Lenses:
    """Makes the readers of lenses.

    Args:
        unembedding: the model's.
        num_layers: blocks of the model.
        d_model: width of the stream.
        device: the worker's.
    """

    def __init__(self, unembedding: Unembedding, num_layers: int, d_model: int, device: torch.device) -> None:
        self.unembedding = unembedding
        self._num_layers, self._d_model, self._device = num_layers, d_model, device
        self._tuned: dict[_Version, list[Translator]] = {}

    def reader(self, read_out: ReadOut) -> LensReader:
        """Return the reader of a lens at a block.

        Raises:
            WeirError: if it cannot be read.
        """
        if self.unembedding.logits is None:
            raise WeirError(self.unembedding.refused, "lens")
        translator = self._translator(read_out) if read_out.key else None
        return LensReader(self.unembedding, self._d_model, read_out.top_k, translator)

    def _translator(self, read_out: ReadOut) -> Translator | None:
        """Return the translator of what leaves a block: that of the next block; the last has none."""
        version = _version(Path(read_out.key))
        if version not in self._tuned:
            translators = load_translators(Path(read_out.key), self._num_layers, self._d_model)
            self._tuned = {kept: ready for kept, ready in self._tuned.items() if kept[0] != version[0]}
            while len(self._tuned) >= MAX_TUNED:
                del self._tuned[next(iter(self._tuned))]
            self._tuned[version] = self._on_device(translators)
        layer = read_out.site.layer + 1
        return None if layer == self._num_layers else self._tuned[version][layer]

    def _on_device(self, translators: list[Translator]) -> list[Translator]:
        """Return translators on the device, for which those of other lenses may have to go."""
        while True:
            try:
                return [(a.to(self._device), b.to(self._device)) for a, b in translators]
            except torch.OutOfMemoryError:
                if not self._tuned:
                    size = sum(tensor.nbytes for pair in translators for tensor in pair)
                    raise WeirError(
                        f"the device has no room for the {size} bytes of this lens; start the engine with a lower "
                        "gpu_memory_utilization",
                        "lens.path",
                    ) from None
                del self._tuned[next(iter(self._tuned))]


def _version(path: Path) -> _Version:
    try:
        file = os.stat(path / "params.pt")
    except OSError as e:
        raise WeirError(f"{path} has no params.pt: {e}", "lens.path") from None
    return str(path), file.st_mtime_ns, file.st_size


def check_tuned_lens(path: Path, num_layers: int, d_model: int, field: str = "lens.path") -> None:
    """Raise WeirError, naming `field`, unless a directory has a tuned lens for a model of this size.

    The translators themselves are not read.
    """
    try:
        config = json.loads(read_regular(path / "config.json"))
        kind, layers, width = config.get("lens_type"), config["num_hidden_layers"], config["d_model"]
        os.stat(path / "params.pt")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise WeirError(
            f"{path} is no tuned lens with config.json and params.pt: {type(e).__name__}: {e}", field
        ) from None
    if kind not in (None, "linear_tuned_lens"):
        raise WeirError(f"its lens_type is {kind!r}; served is 'linear_tuned_lens'", field)
    if (layers, width) != (num_layers, d_model):
        raise WeirError(
            f"it is for {layers} blocks of width {width}, and the model has {num_layers} of width {d_model}", field
        )


def load_translators(path: Path, num_layers: int, d_model: int) -> list[Translator]:
    """Load a directory that the package `tuned-lens` has saved: ``config.json`` and ``params.pt``.

    Translator i is for what enters block i. Nothing in the files is run.

    Raises:
        WeirError: if they cannot be read, or are for another model.
    """
    check_tuned_lens(path, num_layers, d_model)
    state = load_torch(path / "params.pt", "lens.path")
    wanted = {f"{layer}.{name}" for layer in range(num_layers) for name in ("weight", "bias")}
    if not isinstance(state, dict) or set(state) != wanted:
        raise WeirError("its params.pt does not have one weight and one bias for each block", "lens.path")
    found = [(state[f"{layer}.weight"], state[f"{layer}.bias"]) for layer in range(num_layers)]
    for layer, (weight, bias) in enumerate(found):
        if not (isinstance(weight, torch.Tensor) and isinstance(bias, torch.Tensor)):
            raise WeirError(f"the translator of block {layer} is no pair of tensors", "lens.path")
        if weight.shape != (d_model, d_model) or bias.shape != (d_model,):
            raise WeirError("a translator has another width than the model", "lens.path")
        if not (weight.isfinite().all() and bias.isfinite().all()):
            raise WeirError(f"the translator of block {layer} has numbers that are not finite", "lens.path")
    # Copied: they are mapped from a file that may be replaced.
    return [(weight.float().clone(), bias.float().clone()) for weight, bias in found]
