"""`Delivery`: one sequence's rows for one sink, assembled in the sink's thread."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_weir.consumers.base import Finished, Rows
from vllm_weir.frontend.outputs.ticket import Ticket
from vllm_weir.results.scores import Scores
from vllm_weir.schema.hooks import Site

if TYPE_CHECKING:
    from vllm_weir.frontend.outputs.view import OutputView

logger = logging.getLogger(__name__)
_NAMES = ("positions", "token_ids", "data")


class Delivery:
    """The rows of one sequence for one sink.

    Args:
        release: called once, when the rows are no longer needed in memory.
        scored: whether the consumer gets scores, too.

    Attributes:
        size: bytes of the rows.
        request: the sequence, as the consumer gets it.
        ticket: has the outcome once the delivery is done.
    """

    def __init__(
        self, view: OutputView, request: Finished, ticket: Ticket, release: Callable[[], None], scored: bool = False
    ) -> None:
        self.size = view.size
        self._scored = scored
        self.request, self.ticket = request, ticket
        self._view: OutputView | None = view
        self._release: Callable[[], None] | None = release
        self._file: Path | None = None
        self._scores: Scores | None = None
        self._lock = threading.RLock()

    def set_mark(self, metadata: dict[str, Any]) -> None:
        self.request = replace(self.request, metadata=metadata)

    def rows(self) -> Iterator[Rows]:
        """Yield the rows of each site, waiting for those that have not arrived yet.

        Raise WeirError if rows were lost.
        """
        with self._lock:
            if self._file is not None:
                yield from _read(self._file, self.request)
            elif self._view is not None:
                yield from self._assemble(self._view)

    def scores(self) -> Scores:
        """Return the scores of all probes that scored the sequence, waiting for them.

        Raise WeirError if the request has failed, or scores do not come in time.
        """
        with self._lock:
            if self._scores is None:
                self._scores = Scores({}, {}) if self._view is None else self._view.every_score()
            return self._scores

    def spill(self, folder: Path) -> None:
        """Write the rows to a temporary file in a folder, and free their memory."""
        with self._lock:
            if self._view is None:
                return
            if self._scored:
                self.scores()  # they stay in memory
            handle, name = tempfile.mkstemp(dir=folder, prefix="weir-", suffix=".safetensors")
            os.close(handle)
            try:
                _write(Path(name), self._assemble(self._view))
            except BaseException:
                os.unlink(name)
                raise
            self._file = Path(name)
            self._release_view()

    def discard(self) -> None:
        """Free the rows and delete the temporary file."""
        with self._lock:
            self._release_view()
            file, self._file = self._file, None
            if file is not None:
                try:
                    file.unlink(missing_ok=True)
                except OSError as e:  # not fatal: the folder is removed when the sink closes
                    logger.error(
                        "the rows of request %s stay in %s until the sink closes: %s", self.request.name, file, e
                    )

    def evict(self) -> None:
        self.discard()
        self.ticket.close("evicted")

    def _assemble(self, view: OutputView) -> Iterator[Rows]:
        acts = view.activations()
        self.ticket.missing = view.missing(acts)
        for site in acts.sites:
            data, header = acts.compressed(site) if acts.is_compressed else (acts[site], None)
            yield Rows(self.request, site, acts.positions_of(*site), acts.token_ids_of(*site), data, header)

    def _release_view(self) -> None:
        self._view = None
        release, self._release = self._release, None
        if release is not None:
            release()


def _write(path: Path, rows: Iterator[Rows]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    index = []
    for k, site_rows in enumerate(rows):
        tensors |= {f"{k}.{name}": getattr(site_rows, name).contiguous() for name in _NAMES}
        index.append([site_rows.site.hook, site_rows.site.layer, site_rows.compression])
    # Sites can share positions, and safetensors does not write tensors that share memory.
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, path, metadata={"index": json.dumps(index)})


def _read(path: Path, request: Finished) -> Iterator[Rows]:
    with safe_open(path, framework="pt") as file:
        for k, (hook, layer, compression) in enumerate(json.loads(file.metadata()["index"])):
            tensors = {name: file.get_tensor(f"{k}.{name}") for name in _NAMES}
            yield Rows(request, Site(hook, layer), compression=compression, **tensors)
