"""The order on the device, with a stand-in for CUDA: rows are copied behind the kernel that writes them."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_weir import Site
from vllm_weir.schema.engine_traits import TableSizes
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import ResolvedSpec, SiteRequest
from vllm_weir.schema.taps import STAGES, num_taps, tap_of
from vllm_weir.worker.planning.columns import ROW_COPY
from vllm_weir.worker.planning.planner import Planner
from vllm_weir.worker.steering.programs import ProgramTable
from vllm_weir.worker.transfer import streamed_copy
from vllm_weir.worker.transfer.codecs import Codecs
from vllm_weir.worker.transfer.copy_out import CudaCopyOut
from vllm_weir.worker.transfer.ring import Ring
from vllm_weir.worker.transfer.streamed_copy import StreamedCopy

D, LAYERS, CPU = 8, 3, torch.device("cpu")


class Device:
    """What is queued: on the main stream until a copy is asked for, on the side stream from then on."""

    def __init__(self, monkeypatch):
        self.log = []
        self.stream = SimpleNamespace(wait_event=lambda event: self.log.append(("wait", event)))
        monkeypatch.setattr(torch.cuda, "Event", lambda: _Event(self))
        monkeypatch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())

    def note(self, what):
        return lambda *_args, **_more: self.log.append((what, None))

    def check(self, kernel, copy):
        """Each copy waits for an event that was recorded on the main stream after the last kernel before it."""
        copies = [at for at, (what, _) in enumerate(self.log) if what == copy]
        for at in copies:
            last = max((k for k in range(at) if self.log[k][0] == kernel), default=0)
            recorded = [event for what, event in self.log[last:at] if what == "record main"]
            waited = [event for what, event in self.log[last:at] if what == "wait"]
            assert any(event in recorded for event in waited), self.log
        return len(copies)


class _Event:
    def __init__(self, device):
        self._device = device

    def record(self, stream=None):
        self._device.log.append(("record main" if stream is None else "record side", self))

    def query(self):
        return True

    def wait(self):
        pass

    def synchronize(self):
        pass


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


def test_a_step_is_copied_behind_its_kernels(device):
    copy_out = CudaCopyOut.__new__(CudaCopyOut)
    released = []
    copy_out._ring = SimpleNamespace(release_after=lambda *piece: released.append(piece))
    copy_out.stream, copy_out.send = device.stream, device.note("copy")
    plan = SimpleNamespace(has_records=False, segments=np.zeros(1, ROW_COPY), rows=3)
    copy_out.ship(plan, 5, list, list)
    assert device.check("kernel", "copy") == 1
    (what, copied) = device.log[-1]
    assert what == "record side" and released == [(5, 3, copied)]


def test_a_band_is_copied_behind_the_tap_that_completes_it(device, monkeypatch):
    taps = num_taps(LAYERS)
    table = ProgramTable(TableSizes(1, 1, 1), taps, range(taps), D)
    planner = Planner(frozenset(range(taps * STAGES)), taps * STAGES, 4, table)
    sites = [Site("resid_post", layer) for layer in range(LAYERS)]
    spec = ResolvedSpec(tuple(SiteRequest(site, Positions.parse("all"), False) for site in sites))
    planner.add_capture("r", "reader", spec, 4, None, 1)
    plan = planner.plan(["r"], [4], [0])
    copies = device.note("copy")
    copy_out = SimpleNamespace(stream=device.stream, send=copies, send_runs=copies, send_packet=copies)
    numbers = {tap_of(site): torch.tensor([tap_of(site)]) for site in sites}
    addresses = {number.data_ptr(): tap for tap, number in numbers.items()}
    ring, ranks = Ring(2 * 4, D, torch.float32, CPU), torch.zeros(4, taps * STAGES, dtype=torch.int32)
    monkeypatch.setattr(streamed_copy, "launch", device.note("kernel"))
    streamer = StreamedCopy(ring, copy_out, ranks, addresses, Codecs(D, CPU))
    streamer.begin(plan, planner.site_sets.columns_of)
    for number in numbers.values():
        streamer.tap(None, None, number, plan, None, ring.buffer)
    streamer.end(plan)
    assert device.check("kernel", "copy") >= LAYERS - 1
