"""Sequences with probes whose scores come in messages, without a worker."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.unit.request_strategies import served
from vllm_weir import messages
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.admission.admitted import AdmittedRequest
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.receive.mapped_buffer import MappedBuffer
from vllm_weir.frontend.receive.pending_sequence import PendingSequence
from vllm_weir.frontend.receive.row_store import RowStore
from vllm_weir.schema.gates import StopRule
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.resolved_probes import LINEAR, ResolvedProbe

LAYERS, D = 3, 4
FACTS = EngineCapabilities(served(LAYERS), LAYERS, D, "float32", 1000)
NO_ARRIVALS, NO_STEERED = np.zeros((0, len(messages.MARK_FIELDS)), np.int32), np.zeros((0, 4), np.int32)


def probe(name="p", positions="all", outputs=1, layer=1) -> ResolvedProbe:
    rows = tuple(f"{name}{i}" for i in range(outputs))
    return ResolvedProbe(name, "resid_post", layer, Positions.parse(positions), LINEAR, outputs, rows, (0.0,) * outputs)


def rule(name="p", op=">", threshold=0.5, index=0, output=0) -> StopRule:
    return StopRule(name, index, output, op, threshold)


def admitted(probes, stops=(), asks=None, gate_of=None, **more) -> AdmittedRequest:
    """`gate_of`: the gates of the interventions that are asked for, in order."""
    fields = {"told": len(probes)} | more
    request = admit({"weir": asks} if asks else {}, FACTS)
    if gate_of is not None:
        pairs = zip(request.interventions, gate_of, strict=True)
        fields["interventions"] = tuple(one._replace(gate=gate) for one, gate in pairs)
    return replace(request, probes=tuple(probes), stops=tuple(stops), **fields)


def opened(store, request, prompt=(1, 2, 3), name="r") -> PendingSequence:
    pending = PendingSequence(name, request, list(prompt), store)
    store.open(pending)
    return pending


class Worker:
    """What a worker tells a store of scores."""

    def __init__(self, store: RowStore, name="w") -> None:
        self.store, self.name = store, name
        self._series: dict[str, tuple[int, int]] = {}
        self._opened = 0

    def reopen(self, request_id: str) -> None:
        """The request was preempted: it gets another series."""
        del self._series[request_id]

    def send(self, *entries, reported=1, **header) -> None:
        """Send (request id, first position, [cells of each position]) in one message."""
        layout, scored, scores = messages.LayoutUpdate(), [], []
        for request_id, first, cells in entries:
            if request_id not in self._series:
                self._opened += 1
                self._series[request_id] = self._opened, reported
                layout.series.append(messages.SeriesOpened(self._opened, request_id, reported))
            scored.append((self._series[request_id][0], first, len(cells)))
            scores.append(np.asarray(cells, np.float32).reshape(len(cells), -1))
        made = messages.MessageHeader(
            "t",
            self.name,
            D,
            "float32",
            layout,
            scored=np.array(scored, np.int32).tobytes(),
            scores=b"".join(one.tobytes() for one in scores),
            **header,
        )
        self.store.receive(messages.decode(messages.encode(made)), MappedBuffer(), NO_ARRIVALS, NO_STEERED, b"")
