"""vLLM's own compile backend, as GPUs have it: cut at attention, compiled once for blocks alike, loaded again.

vLLM does without it on CPU, to start sooner; here its platform is kept from that.
"""

from __future__ import annotations

import pytest

from tests.engine.common import directory, oracle
from tests.engine.test_compiled import check_all, check_steering
from tests.support.engines import close_all, get_llm
from tests.support.machine import inductor, needs
from tests.support.steered import SteeredOracle

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), needs(inductor)]
CLOSE_OTHERS = True


@pytest.fixture(scope="module")
def own_backend():
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def keep_the_backend(cls, config):
        check(cls, config)
        config.compilation_config.mode = CompilationMode.VLLM_COMPILE
        config.compilation_config.compile_sizes = []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep_the_backend))
        patch.setattr(FixFunctionalizationPass, "__call__", lambda *_: None)  # looks for ops that only GPUs have
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return {"VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("vllm-cache"))}


def start(root, cache):
    """An engine, and what its start counted."""
    from vllm.compilation.counter import compilation_counter

    close_all()
    before = vars(compilation_counter).copy()
    llm = get_llm(directory(root), enforce_eager=False, env=cache)
    return llm, {k: n - before[k] for k, n in vars(compilation_counter).items() if n != before[k]}


@pytest.mark.usefixtures("own_backend")
def test_one_graph_serves_every_block_and_a_second_start_loads_it(root, cache):
    """Taps differ from block to block by a tensor only, so blocks share their graph; what is loaded has its taps."""
    truth = oracle(directory(root))
    llm, counted = start(root, cache)
    assert truth.num_layers >= 4 and counted["num_piecewise_capturable_graphs_seen"] == truth.num_layers + 1
    assert counted["num_compiled_artifacts_saved"] == 3  # the first piece, the last, and what lies between
    assert counted["num_aot_artifacts_saved"] == 1
    check_all(llm, truth)
    check_steering(llm, SteeredOracle(directory(root)))

    llm, counted = start(root, cache)
    assert counted["num_aot_artifacts_loaded"] == 1 and counted["num_compiled_artifacts_loaded"] == 3
    check_all(llm, truth)
    check_steering(llm, SteeredOracle(directory(root)))


@pytest.mark.thorough
@pytest.mark.usefixtures("own_backend")
def test_what_was_compiled_with_other_taps_is_not_loaded(root, cache, monkeypatch):
    truth = oracle(directory(root))
    start(root, cache)  # the test before has compiled it, where it ran
    monkeypatch.setenv("WEIR_LAYERS", "0,1,2")
    _, counted = start(root, cache)
    assert "num_aot_artifacts_loaded" not in counted and counted["num_aot_artifacts_saved"] == 1
    monkeypatch.delenv("WEIR_LAYERS")
    llm, counted = start(root, cache)
    assert counted["num_aot_artifacts_loaded"] == 1
    check_all(llm, truth)
