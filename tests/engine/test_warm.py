"""`weir.warm` on a live engine: what it prepares, refuses and leaves alone."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

import vllm_weir as weir
from tests.engine.common import assert_nothing_is_held
from tests.support.hook_functions import clamp_norm
from tests.support.steered import generated, prompt, sampling
from vllm_weir.errors import WeirError
from vllm_weir.frontend.lookup import frontend_of

pytestmark = pytest.mark.engine("default")
D = 128


CALLS = []


def counting(rows, ctx):
    """A compiled hook, which notes that it was called."""
    CALLS.append(len(rows))
    return rows * 1.0


@pytest.fixture
def told(llm, monkeypatch):
    """What the workers were told to warm."""
    engine, found = llm.llm_engine, []
    call = engine.collective_rpc

    def noted(method, *args, **kwargs):
        if method == "weir_warm":
            found.append(kwargs["args"])
        return call(method, *args, **kwargs)

    monkeypatch.setattr(engine, "collective_rpc", noted)
    return found


def vector(seed=1):
    return torch.randn(D, generator=torch.Generator().manual_seed(seed)) / 4


def asked():
    """Params that use what the engine has: captures, vectors, probes, a compiled hook, a reduction."""
    probe = weir.Probe("warm", vector(2), layer=2)
    return [
        weir.params(sampling(6), capture=weir.Capture("resid_post", [1, 3])),
        weir.params(sampling(6), interventions=[weir.Add(vector(), 1, 2.0)], probes=[probe], dose=True),
        weir.params(sampling(6), hooks=weir.Hook(clamp_norm, layers=2, args={"most": 5.0}, mode="compiled")),
        weir.params(sampling(6), capture=weir.Capture("mlp_out", [2], positions="prompt", reduce="mean")),
        sampling(6),
    ]


def answers(llm):
    outs = generated(llm, [prompt(20 + k, k) for k in range(len(asked()))], asked())
    rows = [acts[site].clone() for acts in (outs[0].activations, outs[3].activations) for site in acts.sites]
    return [out.outputs[0].token_ids for out in outs], rows, [outs[1].scores["warm"].clone()]


def blocks(llm):
    """How many blocks of the KV cache can be found, and how many are free."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return len(pool.cached_block_hash_to_block), pool.get_num_free_blocks()


def test_outputs_are_the_same_and_nothing_is_left(llm):
    llm.reset_prefix_cache()
    before = answers(llm)
    llm.reset_prefix_cache()
    there, state, numbers = blocks(llm), torch.get_rng_state(), np.random.get_state()[1].copy()
    done = weir.warm(llm, *asked())
    # Each of the four alone, those that generated positions need together, and all of them.
    assert done.tap_sets == 6 and done.seconds > 0
    assert (done.graphs, done.failed, done.graph_bytes, done.pinned_bytes) == (0, 0, 0, 0), "a CPU has no graphs"
    assert blocks(llm) == there
    assert torch.equal(torch.get_rng_state(), state) and (np.random.get_state()[1] == numbers).all()
    assert_nothing_is_held(llm)
    after = answers(llm)
    for old, new in zip(before, after, strict=True):
        assert len(old) == len(new) and all(
            a == b if isinstance(a, (list, tuple)) else torch.equal(a, b) for a, b in zip(old, new, strict=True)
        )
    del before, after, old, new
    assert_nothing_is_held(llm)


def test_what_is_found_in_the_prefix_cache_is_found_still(llm):
    """A prompt that has to be long for its positions fills blocks, which no other request finds."""
    llm.reset_prefix_cache()
    ids = prompt(100, 7)
    generated(llm, [ids], [sampling(1)])
    far = weir.params(sampling(2), capture=weir.Capture("resid_post", [1], positions=[90]))
    weir.warm(llm, far)
    # The same tokens as those of the warm-up.
    (hit,) = generated(llm, [ids], [sampling(1)])
    (plain,) = generated(llm, [[10] * 128], [sampling(1)])
    assert (hit.num_cached_tokens, plain.num_cached_tokens) == (96, 0)


@pytest.mark.parametrize(
    ("more", "length"),
    [
        ({"capture": weir.Capture("resid_post", [1])}, 4),
        ({"capture": weir.Capture("resid_post", [1], positions=[0, 90])}, 4),
        ({"capture": weir.Capture("resid_post", [1], positions=90)}, 128),
        ({"capture": weir.Capture("resid_post", [1], positions="40:50")}, 39),
        ({"capture": weir.Capture("resid_post", [1], positions=-30)}, 30),
        ({"interventions": [weir.Add(torch.ones(7, D), 1, positions="prompt")]}, 7),
        ({"interventions": [weir.Add(torch.ones(70, D), 1, positions="prompt")]}, 70),
    ],
)
def test_the_prompt_is_as_long_as_positions_need(llm, told, more, length):
    done = weir.warm(llm, weir.params(sampling(9), **more), host_bytes=1 << 20)
    (((_, found),), most, pinned), *rest = told
    assert (found, most, pinned, rest) == (length, None, 1 << 20, []) and done.tap_sets == 1


@pytest.mark.parametrize(
    ("more", "lengths"),
    [
        ({"capture": weir.Capture("resid_post", [1])}, [4, 65]),
        ({"capture": weir.Capture("resid_post", [1], positions=90)}, [128]),
        ({"interventions": [weir.Add(torch.ones(7, D), 1, positions="prompt")]}, [7]),
    ],
)
def test_where_there_are_graphs_a_step_that_is_larger_runs_too(llm, told, monkeypatch, more, lengths):
    """Its rows are sent another way. Positions that fit one length only have no second prompt."""
    monkeypatch.setattr(frontend_of(llm), "largest_graph", 64)
    done = weir.warm(llm, weir.params(sampling(9), **more))
    assert [length for _, length in told[0][0]] == lengths and done.tap_sets == 1
    assert_nothing_is_held(llm)


def test_what_is_asked_of_the_workers(llm, told):
    frontend, one = frontend_of(llm), weir.params(sampling(4), capture=weir.Capture("resid_post", [1]))
    weir.warm(llm, one, one, batch_sizes=[3, 9, 2], prompt=prompt(21, 3))
    weir.warm(llm, weir.params(interventions=[weir.Add(vector(), 1)]), batch_sizes=5)
    weir.warm(llm, sampling(4))  # asks nothing
    (wanted, most, pinned), (steered, five, none), (nothing, *_) = told
    share = frontend.settings.step_rows(D, 4) * D * 4
    assert [length for _, length in wanted] == [21, 21] and (most, pinned) == (9, share)
    assert len(steered) == 1 and (five, none) == (5, 0) and nothing == []


def test_nothing_is_delivered_or_counted(llm, tmp_path):
    """Sinks, the observer of a server, and vLLM's statistics see nothing; user's params do not change."""
    frontend, processor, seen = frontend_of(llm), llm.llm_engine.output_processor, []

    class Observer:
        def __getattr__(self, name):
            return lambda *args: seen.append(name)

    target = tmp_path / "rows"
    capture = weir.Capture("resid_post", [1], sink={"safetensors": {"path": str(target)}}, keep="marked")
    one = weir.params(sampling(5), capture=[capture, weir.Capture("resid_post", [2])])
    before, frontend.observer = repr(one), Observer()
    for name in ("_update_stats_from_output", "_update_stats_from_finished"):
        setattr(processor, name, lambda *args, name=name: seen.append(name))
    try:
        weir.warm(llm, one)
        assert seen == []
        generated(llm, [prompt(9)], [sampling(1)])
        assert seen == ["_update_stats_from_output", "_update_stats_from_finished"], "others are counted again"
    finally:
        frontend.observer = None
        for name in ("_update_stats_from_output", "_update_stats_from_finished"):
            delattr(processor, name)
    assert not target.exists() and not weir.sinks(llm) and repr(one) == before
    assert not frontend.manager.marks.had("") and not frontend.global_told
    assert_nothing_is_held(llm)


def test_a_compiled_hook_is_warm_once_it_is_registered(llm, told, monkeypatch):
    monkeypatch.setattr(frontend_of(llm), "largest_graph", 64)
    compiled = weir.Hook(clamp_norm, layers=2, args={"most": 5.0}, mode="compiled")
    weir.register_hook(llm, "clip", compiled)
    assert [length for _, length in told[0][0]] == [4, 65] and len(told) == 1
    CALLS.clear()
    weir.register_hook(llm, "cold", compiled, warm=False)
    weir.register_hook(llm, "eager", weir.Hook(counting, layers=2))
    weir.register_hook(llm, "state", weir.Hook(counting, layers=2, mode="compiled", state=(1,)))
    assert len(told) == 1 and not CALLS, "no graph can hold them"
    with pytest.raises(WeirError, match="warm"):
        weir.register_hook(llm, "clip", compiled, warm=1)
    for name in weir.list_hooks(llm):
        weir.unregister_hook(llm, name)
    assert_nothing_is_held(llm)


def test_a_hook_that_cannot_be_warmed_is_registered_and_the_log_says_so(llm, told, monkeypatch, caplog):
    monkeypatch.setattr(frontend_of(llm), "largest_graph", 64)
    monkeypatch.setattr(logging.getLogger("vllm_weir"), "propagate", True)
    weir.register_hook(llm, "clip", weir.Hook(clamp_norm, layers=2, mode="compiled"))  # needs an arg
    assert "captured when requests first need them" in caplog.text and not told
    llm.llm_engine.add_request("running", prompt(9), sampling(2))
    caplog.clear()
    weir.register_hook(llm, "busy", weir.Hook(clamp_norm, layers=2, args={"most": 5.0}, mode="compiled"))
    assert "unfinished requests" in caplog.text and not told
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    assert weir.list_hooks(llm).keys() == {"clip", "busy"}
    for name in weir.list_hooks(llm):
        weir.unregister_hook(llm, name)


@pytest.mark.parametrize(
    ("given", "options", "field"),
    [
        ((), {}, "params"),
        (({"max_tokens": 3},), {}, r"params\[0\]"),
        ((sampling(3),) * 257, {}, "params"),
        ((sampling(3),), {"batch_sizes": 0}, "batch_sizes"),
        ((sampling(3),), {"batch_sizes": [4, True]}, "batch_sizes"),
        ((sampling(3),), {"batch_sizes": []}, "batch_sizes"),
        ((sampling(3),), {"host_bytes": -1}, "host_bytes"),
        ((weir.params(sampling(3), capture=weir.Capture("resid_post", [99])),), {}, "capture.*layers"),
        ((weir.params(sampling(1), capture=weir.Capture("resid_post", [1], positions="generated")),), {}, "positions"),
        ((weir.params(sampling(3), capture=weir.Capture("resid_post", [1], positions=9000)),), {}, "positions"),
        ((weir.params(sampling(3), probes="nobody"),), {}, "probes"),
    ],
)
def test_refusals(llm, told, given, options, field):
    """Those of a request, and its own; nothing is left behind."""
    with pytest.raises(WeirError, match=field):
        weir.warm(llm, *given, **options)
    assert not told and not llm.llm_engine.has_unfinished_requests()
    assert_nothing_is_held(llm)


def test_an_engine_that_has_requests_says_so(llm, told):
    engine = llm.llm_engine
    engine.add_request("running", prompt(9), sampling(2))
    with pytest.raises(WeirError, match="unfinished requests"):
        weir.warm(llm, sampling(2))
    while engine.has_unfinished_requests():
        engine.step()
    assert not told


def test_a_function_that_fails_is_told(llm, told):
    def wrong(rows, ctx):
        raise RuntimeError("never")

    with pytest.raises(WeirError, match="never"):
        weir.warm(llm, weir.params(sampling(3), hooks=weir.Hook(wrong, layers=1)))
    assert not told
    assert_nothing_is_held(llm)
