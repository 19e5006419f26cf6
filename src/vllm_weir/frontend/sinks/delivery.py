"""Jobs: one sequence's rows for one sink, assembled (or read back from a temporary file) in the sink's thread."""

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
from vllm_weir.schema.hooks import Site

if TYPE_CHECKING:
    from vllm_weir.frontend.outputs.view import OutputView

logger = logging.getLogger(__name__)
_NAMES = ("positions", "token_ids", "data")


class Delivery:
    """Rows on their way.

    Attributes:
        size: bytes of the rows.
        request: whose they are.
        ticket: where it is said what became of them.

    Args:
        release: called once when the rows are not needed here any more.
    """

    def __init__(self, view: OutputView, request: Finished, ticket: Ticket, release: Callable[[], None]) -> None:
        self.size = view.rows * view.row_bytes
        self.request, self.ticket = request, ticket
        self._view: OutputView | None = view
        self._release: Callable[[], None] | None = release
        self._file: Path | None = None
        self._lock = threading.RLock()

    def marked(self, metadata: dict[str, Any]) -> None:
        """The caller has marked the request."""
        self.request = replace(self.request, metadata=metadata)

    def rows(self) -> Iterator[Rows]:
        """One after the other, each site's; waits for those that are still on their way.

        Raises:
            WeirError: if rows were lost.
        """
        with self._lock:
            if self._file is not None:
                yield from _read(self._file, self.request)
            elif self._view is not None:
                yield from self._assemble(self._view)

    def spill(self, folder: Path) -> None:
        """Put the rows into a temporary file, so that they hold no memory while they wait."""
        with self._lock:
            if self._view is None:
                return
            handle, name = tempfile.mkstemp(dir=folder, prefix="weir-", suffix=".safetensors")
            os.close(handle)
            try:
                _write(Path(name), self._assemble(self._view))
            except BaseException:
                os.unlink(name)
                raise
            self._file = Path(name)
            self._let_go()

    def over(self) -> None:
        """The rows are not needed any more."""
        with self._lock:
            self._let_go()
            file, self._file = self._file, None
            if file is not None:
                try:
                    file.unlink(missing_ok=True)
                except OSError as e:  # the sink goes on: its folder is removed when it closes
                    logger.error("the rows of request %s stay in %s for now: %s", self.request.name, file, e)

    def evict(self, why: str) -> None:
        """The rows were not marked in time."""
        self.over()
        self.ticket.close("evicted")

    def _assemble(self, view: OutputView) -> Iterator[Rows]:
        acts = view.activations()
        self.ticket.missing = view.missing(acts)
        for site in acts.sites:
            data, header = acts.compressed(site) if acts.is_compressed else (acts[site], None)
            yield Rows(self.request, site, acts.positions_of(*site), acts.token_ids_of(*site), data, header)

    def _let_go(self) -> None:
        self._view = None
        release, self._release = self._release, None
        if release is not None:
            release()


def _write(path: Path, rows: Iterator[Rows]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    index = []
    for k, one in enumerate(rows):
        tensors |= {f"{k}.{name}": getattr(one, name).contiguous() for name in _NAMES}
        index.append([one.site.hook, one.site.layer, one.compression])
    # Sites can share positions; a file holds each tensor once for each name.
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, path, metadata={"index": json.dumps(index)})


def _read(path: Path, request: Finished) -> Iterator[Rows]:
    with safe_open(path, framework="pt") as file:
        for k, (hook, layer, compression) in enumerate(json.loads(file.metadata()["index"])):
            tensors = {name: file.get_tensor(f"{k}.{name}") for name in _NAMES}
            yield Rows(request, Site(hook, layer), compression=compression, **tensors)
