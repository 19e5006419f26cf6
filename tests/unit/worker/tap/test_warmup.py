"""Before the warm-up: the collector passes over what was there before tracing, and the taps' kernels come in time."""

from __future__ import annotations

import contextlib
import gc
import weakref
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from vllm_weir.config.settings import Settings
from vllm_weir.patches.worker import _patch_warm_up
from vllm_weir.schema.hooks import Site
from vllm_weir.worker.discovery.anchors import Anchor, TensorKey
from vllm_weir.worker.discovery.site_map import SiteMap
from vllm_weir.worker.model_info import ModelInfo
from vllm_weir.worker.runtime import WorkerRuntime
from vllm_weir.worker.tap.op import TapTensors
from vllm_weir.worker.tap.warmup import TapWarmup, score_stand_in, stand_ins


@pytest.fixture(autouse=True)
def thawed():
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.unfreeze()
    if frozen:  # as tests/unit/conftest.py has it
        gc.freeze()


def holding(profile, seen):
    worker = SimpleNamespace(
        determine_available_memory=profile,
        compile_or_warm_up_model=lambda size: seen.append(("warm-up", gc.get_freeze_count())) or size,
        model_runner=SimpleNamespace(device=torch.device("cpu")),
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(kv_cache_memory_bytes=None)),
    )
    _patch_warm_up(worker, SimpleNamespace(wait=lambda: seen.append("kernels")), Settings())
    return worker


def collectable(thing):
    return any(one is thing for one in gc.get_objects())


def test_the_heap_is_frozen_while_the_model_is_traced():
    seen = []
    worker = holding(lambda: gc.get_freeze_count(), seen)
    assert gc.get_freeze_count() == 0
    assert worker.determine_available_memory() > 0
    assert gc.get_freeze_count() == 0
    assert worker.compile_or_warm_up_model(3) == 3
    assert seen == ["kernels", ("warm-up", 0)]


def test_what_somebody_else_has_frozen_stays_frozen():
    theirs = [object()]  # one object, no count: other threads may drop what was frozen meanwhile
    gc.freeze()
    assert not collectable(theirs)
    holding(lambda: None, []).determine_available_memory()
    assert not collectable(theirs)
    gc.unfreeze()
    assert collectable(theirs)


@pytest.mark.parametrize("fails", ["in", "after"])
def test_an_engine_that_fails_to_start_can_be_collected(fails):
    """Without room for its KV cache, say: its model would be kept for as long as the process lives."""

    def profile():
        if fails == "in":
            raise RuntimeError("out of memory")

    worker = holding(profile, [])
    worker.itself = worker  # as engines hold themselves, in many ways
    model = torch.nn.Identity()
    worker.model, gone = model, weakref.ref(model)
    with contextlib.suppress(RuntimeError):
        worker.determine_available_memory()
    del worker, model
    gc.collect()
    assert gone() is None


def test_nothing_is_compiled_for_a_cpu():
    TapWarmup(128, torch.float32, torch.device("cpu")).wait()


def test_a_kernel_that_cannot_be_compiled_is_heard_of_in_time(monkeypatch):
    from vllm_weir.worker.tap import warmup

    def fails(*_):
        raise RuntimeError("no ptxas")

    monkeypatch.setattr(warmup, "_launch", fails)
    made = TapWarmup(128, torch.float32, torch.device("cuda"))
    with pytest.raises(RuntimeError, match="no ptxas"):
        made.wait()


def runtime_of(dtype):
    """A worker's runtime around a block of width 64."""
    sites = SiteMap(1, {Site("resid_post", 0): Anchor("0", "after", TensorKey("out", -1))})
    info = ModelInfo(64, dtype, torch.device("cpu"), 8)
    return WorkerRuntime(torch.nn.Sequential(torch.nn.Identity()), info, Settings.load({}), sites)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_are_compiled_for_what_workers_have(dtype):
    """Whatever torch's default dtype is meanwhile: it belongs to all threads, and vLLM sets it while it loads."""
    runtime = runtime_of(dtype)
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = stand_ins(64, dtype, torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
        runtime.close()
    for hidden, other, number, *tables in made:
        assert hidden.dtype == dtype and (other is None or other.dtype == dtype) and number.dtype == torch.int32
        for table, entry in zip(tables, fields(TapTensors), strict=True):
            assert table.dtype == getattr(runtime.parts.tensors, entry.name).dtype, entry.name
    assert [other is None for _, other, *_ in made] == [True, False]


def test_the_score_kernel_is_compiled_for_what_workers_have():
    runtime = runtime_of(torch.float32)
    runtime.close()
    theirs = runtime.parts.scorer.tensors
    made = score_stand_in(64, theirs.cells.shape[1], torch.device("cpu"))
    for entry in fields(made):
        one, other = getattr(made, entry.name), getattr(theirs, entry.name)
        if isinstance(one, int):
            assert one == other, entry.name
            continue
        assert one.dtype == other.dtype, entry.name
        assert entry.name == "heads" or one.shape[1:] == other.shape[1:], entry.name  # that width is no constant
        assert one.storage_offset() * 4 % 16 == other.storage_offset() * 4 % 16 == 0, "kernels differ by alignment"
    assert not made.offsets.any()


def test_rows_of_other_widths_are_compiled_once_for_each_kernel():
    """A kernel is for a power of two, and for whether 16 divides the width."""
    widths = (64, 100, 112, 128, 96, 256, 8, 256)
    _, _, *more = stand_ins(64, torch.float32, torch.device("cpu"), widths)
    assert all(other is None for _, other, *_ in more)
    assert sorted(hidden.shape[1] for hidden, *_ in more) == [8, 96, 100, 256]
