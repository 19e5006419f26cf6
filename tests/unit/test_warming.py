"""Between loading and warm-up: the collector passes over what was there, and the taps' kernels come in time."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from vllm_weir.seams.worker import _hold_warm_up
from vllm_weir.worker.warming import Warming


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
