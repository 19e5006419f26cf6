"""Lenses on the device: the model's own final norm and unembedding, and what fitted lenses do before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_weir.errors import WeirError
from vllm_weir.lenses.files import LensFile, Translator, open_lens
from vllm_weir.schema.read_outs import ReadOut
from vllm_weir.util.top import as_records, top_logprobs

MAX_LOGITS = 1 << 26
"""Logits that are computed at once. Fewer would read the unembedding's weights more often than its
products take."""
TILE_ROWS = 256
"""Rows of a tile of a matrix product on a GPU; a tile that is filled in part takes as long as a whole one."""
MAX_FITTED = 4
"""Fitted lenses whose translators are kept ready, of the blocks that were asked for."""


@dataclass(frozen=True)
class Unembedding:
    """How the model turns rows of the stream into next-token logits.

    Attributes:
        logits: rows [n, d_model] after the last block -> logits [n, vocabulary]; None if no lens
            is served.
        vocabulary: how many logits a row has.
        refused: why no lens is served; "" if it is.
        lacking: returns why this rank cannot read rows now, though lenses are served; "" if it can.
    """

    logits: Callable[[torch.Tensor], torch.Tensor] | None = None
    vocabulary: int = 0
    refused: str = "no lens is served: the model's unembedding was not found"
    lacking: Callable[[], str] = str


@dataclass(frozen=True, eq=False)
class LensReader:
    """Reads log-probabilities of next tokens off rows of the stream.

    Attributes:
        unembedding: the model's.
        width: values of a row.
        top_k: how many of the likeliest tokens; 0 if there are `ids`.
        translator: of a fitted lens, at this block; None for none.
        ids: chosen tokens instead, on the device; None for the likeliest ones.
    """

    unembedding: Unembedding
    width: int
    top_k: int
    translator: Translator | None = None
    ids: torch.Tensor | None = None

    @property
    def group(self) -> object:
        """Rows of all blocks that are not translated are read together."""
        if self.translator is not None or self.ids is not None:
            return self
        return id(self.unembedding), self.top_k

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the records of rows [n, width], int32 [n, 2 top_k], or [n, ids]."""
        size = max(1, MAX_LOGITS // max(1, self.unembedding.vocabulary))
        if size > TILE_ROWS:
            size -= size % TILE_ROWS
        return torch.cat([self._records(some) for some in rows.split(size)])

    def _records(self, rows: torch.Tensor) -> torch.Tensor:
        if self.translator is not None:
            if rows.is_cuda:
                # The request may leave, and the weights be freed, before the device has used them.
                for tensor in self.translator:
                    if tensor is not None:
                        tensor.record_stream(torch.cuda.current_stream())
            rows = self.translator(rows)
        assert self.unembedding.logits is not None
        logits = self.unembedding.logits(rows)
        if self.ids is None:
            return as_records(*top_logprobs(logits, self.top_k))
        whole = logits.float()
        return (whole[:, self.ids] - whole.logsumexp(1, keepdim=True)).view(torch.int32)


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
        self._ready: dict[LensFile, dict[int, Translator]] = {}
        """Lens -> block -> its translator on the device, the lens that was asked for last at the end."""

    def reader(self, read_out: ReadOut) -> LensReader:
        """Return the reader of a lens at a block.

        Raises:
            WeirError: if it cannot be read.
        """
        if self.unembedding.logits is None:
            raise WeirError(self.unembedding.refused, "lens")
        if why := self.unembedding.lacking():
            raise WeirError(why, "lens")
        translator = self._translator(read_out) if read_out.key else None
        ids = torch.tensor(read_out.ids, device=self._device) if read_out.ids else None
        return LensReader(self.unembedding, self._d_model, read_out.top_k, translator, ids)

    def _translator(self, read_out: ReadOut) -> Translator | None:
        """Return the translator of what leaves a block; that of the last one is not needed."""
        lens, layer = open_lens(read_out.key, "lens.path"), read_out.site.layer
        lens.check_fits(self._num_layers, self._d_model, "lens.path")
        if layer == self._num_layers - 1:
            return None
        # What was read from the same path before has been replaced since.
        self._ready = {one: ready for one, ready in self._ready.items() if one is lens or one.path != lens.path}
        ready = self._ready.pop(lens, {})
        while len(self._ready) >= MAX_FITTED:
            del self._ready[next(iter(self._ready))]
        self._ready[lens] = ready
        if layer not in ready:
            try:
                ready[layer] = self._on_device(lens, lens.translator(layer))
            except WeirError as e:
                raise WeirError(e.message, "lens.path") from None
        return ready[layer]

    def _on_device(self, lens: LensFile, translator: Translator) -> Translator:
        """Return a translator on the device, for which other lenses may have to go."""
        while True:
            try:
                return translator.to(self._device)
            except torch.OutOfMemoryError:
                others = [one for one in self._ready if one is not lens]
                if not others:
                    raise WeirError(
                        f"the device has no room for the {translator.matrix.nbytes} bytes of this lens at one block; "
                        "ask for fewer blocks, or start the engine with a lower gpu_memory_utilization",
                        "path",
                    ) from None
                del self._ready[others[0]]
