"""Rows that stay on a worker: collections of them, how rows get into them, and what is computed from them there.

A request whose capture has the sink ``{"workers": {"rows": key}}`` has its rows sent like any
other's, but to a *kept reader*: an endpoint in the worker itself, which files them in the collection
under the key. Methods are called by `collective_rpc` and return plain data.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vllm_weir import messages
from vllm_weir.errors import WeirError
from vllm_weir.results.site_slices import RowCollection
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.rows import RowShape, row_width
from vllm_weir.schema.taps import column_of
from vllm_weir.util.memory import available_bytes

MEMORY_SHARE = 0.5
"""Of the machine's free memory that a collection may take; other workers may be on it."""
ARRIVAL_TIMEOUT = 300.0
"""Seconds that rows may take from the device to a collection."""


class KeptRows:
    """The collections of a worker.

    Args:
        columns: that this worker sends.
        shapes: site -> shape of a row, where that is not (d_model,).
        d_model: values of a row of the ring.
        dtype: of the stream.
        device: where functions compute.
    """

    def __init__(
        self,
        columns: Collection[int],
        shapes: Mapping[Site, RowShape],
        d_model: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._columns, self._shapes = columns, shapes
        self._d_model, self._dtype, self._device = d_model, dtype, device
        self._collections: dict[str, RowCollection] = {}
        self._opened: dict[int, messages.SequenceOpened] = {}

    def endpoint(self, key: str) -> str:
        """Return the kept reader of a collection. Raises WeirError if there is none under the key."""
        if key not in self._collections:
            raise WeirError("the workers keep no rows under this key (any more)", "capture.sink")
        return messages.KEPT + key

    def begin(self, key: str, sites: Sequence[Sequence[Any]], prompts: int, reduced: bool) -> dict[str, Any]:
        """Begin a collection.

        Args:
            key: its name.
            sites: [hook, layer] of each; of rows of one width.
            prompts: whose rows it will hold.
            reduced: whether these are float32, as reductions are.

        Returns:
            ``{"sites"}``, those whose rows this worker has; or ``{"error", "field"}``.
        """
        own = [site for site in (Site(*site) for site in sites) if column_of(site, False) in self._columns]
        item = 4 if reduced else self._dtype.itemsize
        size = prompts * sum(self._width(site) for site in own) * item
        if size > (free := MEMORY_SHARE * available_bytes()):
            why = f"their rows take {size} bytes on a worker, whose machine has {free:.0f} to spare"
            return {"error": f"{why}; fit fewer layers at a time, or fewer prompts", "field": "layers"}
        self._collections[key] = RowCollection(own)
        return {"sites": [list(site) for site in own]}

    def apply(
        self,
        settle: Callable[[float], bool],
        key: str,
        site: Sequence[Any],
        names: Sequence[str],
        function: str,
        arguments: Sequence[Any],
    ) -> dict[str, Any]:
        """Call a function with the rows of a collection at one site.

        Args:
            settle: waits, so many seconds, until rows under way have been handed to `receive`;
                returns whether they have.
            key: of the collection.
            site: [hook, layer].
            names: of the prompts, in the order of the rows.
            function: ``module:name``, imported here; called with the rows [prompts, width] in host
                memory, the worker's device, the layer and `arguments`. It returns plain data.
            arguments: plain data.

        Returns:
            ``{}`` if another worker has the rows; ``{"value"}``; or ``{"error", "field"}``.
        """
        collection = self._collections.get(key)
        if collection is None or Site(*site) not in collection.sites:
            return {}
        if not settle(ARRIVAL_TIMEOUT):
            return {"error": f"rows did not arrive within {ARRIVAL_TIMEOUT:.0f} s", "field": "llm"}
        try:
            rows = collection.at(Site(*site), names)
            module, _, name = function.partition(":")
            called = getattr(importlib.import_module(module), name)
            return {"value": called(rows, self._device, Site(*site).layer, *arguments)}
        except WeirError as e:
            return {"error": e.message, "field": e.field}

    def end(self, key: str) -> None:
        """Forget a collection, if it is there."""
        if self._collections.pop(key, None) is not None and self._device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def nbytes(self) -> int:
        """Bytes of all rows that are kept."""
        return sum(collection.nbytes for collection in self._collections.values())

    def receive(
        self,
        endpoint: str,
        layout: messages.LayoutUpdate,
        arrivals: np.ndarray,
        payload: bytes,
        failures: dict[str, str],
    ) -> None:
        """Take in what a reader of this endpoint would be told; called by the notifier's thread.

        Args:
            endpoint: of the kept reader.
            layout: what has changed in the layout of its rows.
            arrivals: ARRIVAL [n].
            payload: the rows that have arrived, one after the other.
            failures: request -> why it has failed; "" stands for all.
        """
        collection = self._collections.get(endpoint.removeprefix(messages.KEPT))
        self._opened.update({opened.row_seq: opened for opened in layout.opened})
        if collection is not None:
            collection.failures.update(failures)
            self._file(collection, arrivals, payload)
        for row_seq in layout.closed:
            self._opened.pop(row_seq, None)

    def _file(self, collection: RowCollection, arrivals: np.ndarray, payload: bytes) -> None:
        offset, row_bytes = 0, self._d_model * self._dtype.itemsize
        for row_seq, rank, _, count, _ in arrivals.tolist():
            opened = self._opened[row_seq]
            if rank < 0:
                collection.failures[opened.request_id] = "the host buffer was full, and its rows were dropped"
                continue
            end = offset + count * opened.rank_bytes(row_bytes)
            entry = torch.frombuffer(bytearray(payload[end - opened.rank_bytes(row_bytes) : end]), dtype=torch.uint8)
            offset = end
            collection.put(opened.request_id, self._rows_of(entry, opened, collection.sites))

    def _rows_of(self, entry: torch.Tensor, opened: messages.SequenceOpened, sites: Sequence[Site]) -> torch.Tensor:
        """Return the rows [sites, width] in an entry of a row sequence; reductions are float32."""
        values = entry.view(torch.float32 if opened.kind == "fold" else self._dtype)
        by_column = values[: len(opened.columns) * self._d_model].view(len(opened.columns), self._d_model)
        places = np.array(opened.columns)
        chosen = [np.flatnonzero(places == column_of(site, False)) for site in sites]
        return by_column[torch.from_numpy(np.stack(chosen))].flatten(1)[:, : self._width(sites[0])].contiguous()

    def _width(self, site: Site) -> int:
        return row_width(self._shapes.get(site, (self._d_model,)))
