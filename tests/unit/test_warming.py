"""Between loading and warm-up: the collector passes over what was there, and the taps' kernels come in time."""

from __future__ import annotations

import gc
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from vllm_weir.seams.engine import llm_engine_init
from vllm_weir.seams.worker import _hold_warm_up
from vllm_weir.settings import Settings
from vllm_weir.spec.hooks import Site
from vllm_weir.worker.anchors import Anchor, Key
from vllm_weir.worker.sites import SiteMap
from vllm_weir.worker.station import ModelFacts, Station
from vllm_weir.worker.tap import TapTensors
from vllm_weir.worker.warming import Warming, stand_ins


@pytest.fixture(autouse=True)
def thawed():
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_the_heap_is_frozen_until_the_warm_up_begins():
    seen = []

    def compile_or_warm_up_model(size):
        seen.append(("warm-up", gc.get_freeze_count()))
        gc.freeze()  # as vLLM does, for good
        return size

    warming = SimpleNamespace(wait=lambda: seen.append("kernels"))
    worker = SimpleNamespace(compile_or_warm_up_model=compile_or_warm_up_model)
    _hold_warm_up(worker, warming)
    assert gc.get_freeze_count() > 0 and not seen
    assert worker.compile_or_warm_up_model(3) == 3
    assert seen == ["kernels", ("warm-up", 0)]
    assert gc.get_freeze_count() > 0


def test_an_engine_that_does_not_start_leaves_nothing_frozen():
    """Its model would stay on the device of a process that goes on."""

    def fails(_self):
        _hold_warm_up(SimpleNamespace(compile_or_warm_up_model=print), None)
        raise ValueError("no room for the cache")

    wrapper = llm_engine_init(fails, None)
    with pytest.raises(ValueError, match="no room"):
        wrapper(SimpleNamespace())
    assert gc.get_freeze_count() == 0


def test_nothing_is_compiled_for_a_cpu():
    Warming(128, torch.float32, torch.device("cpu")).wait()


def test_a_kernel_that_cannot_be_compiled_is_heard_of_in_time(monkeypatch):
    from vllm_weir.worker import warming

    def fails(*_):
        raise RuntimeError("no ptxas")

    monkeypatch.setattr(warming, "_launch", fails)
    made = Warming(128, torch.float32, torch.device("cuda"))
    with pytest.raises(RuntimeError, match="no ptxas"):
        made.wait()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_are_compiled_for_what_stations_have(dtype):
    """Whatever torch's default dtype is meanwhile: it belongs to all threads, and vLLM sets it while it loads."""
    sites = SiteMap(1, {Site("resid_post", 0): Anchor("0", "after", Key("out", -1))})
    facts = ModelFacts(64, dtype, torch.device("cpu"), 8)
    station = Station(torch.nn.Sequential(torch.nn.Identity()), facts, Settings.load({}), sites)
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = stand_ins(64, dtype, torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
        station.close()
    for hidden, other, number, *tables in made:
        assert hidden.dtype == dtype and (other is None or other.dtype == dtype) and number.dtype == torch.int32
        for table, entry in zip(tables, fields(TapTensors), strict=True):
            assert table.dtype == getattr(station.tensors, entry.name).dtype, entry.name
    assert [other is None for _, other, *_ in made] == [True, False]
