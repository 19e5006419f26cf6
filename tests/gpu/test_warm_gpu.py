"""`weir.warm` on a GPU: a call with the same params captures no graph then, and the first is as quick as later ones."""

from __future__ import annotations

import statistics
import time

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import assert_nothing_is_held
from tests.gpu.test_graphs_gpu import check_rows, sets, vector
from tests.support.engines import get_llm
from tests.support.hook_functions import clamp_norm
from tests.support.machine import gpus, needs
from tests.support.oracle import Oracle

pytestmark = pytest.mark.gpu
MODES = {"full": {}, "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}}
NUM_SEQS, TOKENS = 32, 24
COMPILED = {"layers": [1], "args": {"most": 5.0}, "mode": "compiled"}
CASES = ("read", "inside", "prompt", "steer", "score", "hook")


@pytest.fixture(scope="module", params=MODES)
def mode(request):
    """By module, so that the tests of one engine come together."""
    return request.param


@pytest.fixture(scope="module")
def oracle(directory):
    return Oracle(directory)


@pytest.fixture
def llm(directory, mode):
    return engine(directory, **MODES[mode])


def engine(directory, **more):
    arguments = dict(enforce_eager=False, kv_cache_memory_bytes=1 << 30, enable_prefix_caching=False)
    return get_llm(directory, **(arguments | dict(max_num_batched_tokens=256, max_num_seqs=NUM_SEQS) | more))


def params_of(case, d_model, **more):
    from vllm import SamplingParams

    base = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    given = {
        "plain": {},
        "read": {"capture": weir.Capture("resid_post")},
        "inside": {"capture": weir.Capture("mlp_out")},
        "prompt": {"capture": weir.Capture("attn_out", positions="prompt", reduce="mean")},
        "steer": {"interventions": [weir.Add(vector(d_model), 1, 3.0, hook="mlp_out")]},
        "score": {"probes": [weir.Probe("p", vector(d_model), layer=1)]},
        "hook": {"hooks": weir.Hook(clamp_norm, **COMPILED)},
        "named": {"hooks": weir.Use("clip")},
    }[case]
    return weir.params(base, **given | more) if given else base


def call(llm, params, n=24):
    """A batch whose prompts take several steps, which shrinks as the longer requests go on; its outputs and seconds."""
    prompts = [{"prompt_token_ids": [5 + (7 * i + j) % 400 for j in range(5 + 9 * i)]} for i in range(n)]
    began = time.perf_counter()
    outs = llm.generate(prompts, params, use_tqdm=False)
    for out in outs:
        if getattr(out, "activations", None) is not None:
            [out.activations[site] for site in out.activations.sites]
    return outs, time.perf_counter() - began


def captured(llm):
    report = sets(llm)
    return report["live"], len(report["captured_late"])


def warmed(llm, *params, **options):
    """Warm; return what was done, with the counts of graphs checked."""
    before = captured(llm)
    done = weir.warm(llm, *params, **options)
    after = captured(llm)
    # The short requests themselves may have had one captured.
    assert after[0] - before[0] == done.graphs + after[1] - before[1] and done.failed == 0
    return done


@pytest.mark.parametrize("case", CASES)
def test_a_call_after_warming_captures_nothing_and_its_first_is_as_quick(llm, oracle, case):
    call(llm, params_of("plain", oracle.hidden_size))  # what vLLM itself does at a first call
    params = params_of(case, oracle.hidden_size)
    done = warmed(llm, params)
    assert done.graphs > 0 and done.without_graphs == 0 and done.tap_sets == 1
    before, steps = captured(llm), sets(llm)["steps"]
    outs, first = call(llm, params)
    seconds = []
    for _ in range(3):
        seconds.append(call(llm, params)[1])
    now = sets(llm)
    made = {kind: now["steps"].get(kind, 0) - steps.get(kind, 0) for kind in ("exact", "wider", "without")}
    later = statistics.median(seconds)
    print(f"\n{case}: {done}; first {first:.3f} s, then {later:.3f} s; steps {made}")
    assert captured(llm) == before, "a user's call captured a graph"
    assert made["wider"] == made["without"] == 0
    assert made["exact"] > 0 or case == "prompt"  # whose steps may all be larger than any graph
    assert first <= 1.3 * later + 0.2, "a capture of all sizes takes longer"  # other tests share the card
    if case == "read":
        for out in outs[::5]:
            check_rows(out, "read", oracle)
        del out
    del outs
    assert weir.warm(llm, params).graphs == 0
    assert_nothing_is_held(llm)


def test_several_together(llm, oracle):
    """Each alone, and a batch of all of them."""
    params = [params_of(case, oracle.hidden_size) for case in ("read", "steer", "prompt")]
    weir.warm(llm, *params)
    before = captured(llm)
    for given in (*params, params * 8):
        call(llm, given)
    assert captured(llm) == before


def test_only_the_batch_sizes_that_are_asked_for(directory, oracle):
    llm = engine(directory, max_num_batched_tokens=128)
    params = params_of("inside", oracle.hidden_size)
    few, rest = weir.warm(llm, params, batch_sizes=2), weir.warm(llm, params)
    assert few.graphs > 0 < rest.graphs
    before = captured(llm)
    call(llm, params, 2)
    assert captured(llm) == before


def test_host_memory_is_pinned(directory, oracle):
    llm = engine(directory, additional_config={"weir": {"host_bytes": 1 << 30}})
    params = params_of("read", oracle.hidden_size)
    assert weir.warm(llm, params_of("steer", oracle.hidden_size)).pinned_bytes == 0
    weir.warm(llm, params)  # a thread pins ahead of what is used, so how much this does may differ
    assert weir.warm(llm, params).pinned_bytes == 0
    assert weir.warm(llm, params, host_bytes=1 << 30).pinned_bytes > 1 << 28
    assert weir.warm(llm, params, host_bytes=1 << 30).pinned_bytes == 0


def test_a_named_hook_has_its_graphs_once_it_is_registered(llm, oracle):
    """Before any request; those with other args replay them, too."""
    live = captured(llm)[0]
    weir.register_hook(llm, "clip", weir.Hook(clamp_norm, **COMPILED | {"layers": [2]}))
    try:
        before = captured(llm)
        assert before[0] > live
        call(llm, params_of("named", oracle.hidden_size))
        call(llm, params_of("named", oracle.hidden_size, hooks=weir.Use("clip", args={"most": 2.0})))
        assert captured(llm) == before
    finally:
        weir.unregister_hook(llm, "clip")


def test_others_are_as_they_were(directory, oracle):
    """Tokens of plain requests, and of those that have other taps, before and after."""
    llm = engine(directory, max_num_batched_tokens=192)
    plain, read = params_of("plain", oracle.hidden_size), params_of("read", oracle.hidden_size)
    before, _ = call(llm, plain)
    weir.warm(llm, params_of("steer", oracle.hidden_size), params_of("hook", oracle.hidden_size))
    after, _ = call(llm, plain)
    assert [out.outputs[0].token_ids for out in before] == [out.outputs[0].token_ids for out in after]
    outs, _ = call(llm, read)
    for out in outs[::7]:
        check_rows(out, "read", oracle)
    torch.cuda.synchronize()


@needs(gpus(2))
def test_ranks_warm_alike(directory, oracle):
    llm = engine(directory, in_process=False, tensor_parallel_size=2)
    params = params_of("inside", oracle.hidden_size)
    done = weir.warm(llm, params)
    assert done.graphs > 0 == done.failed
    live = [report["live"] for report in llm.collective_rpc("weir_graphs")]
    call(llm, params)
    assert [report["live"] for report in llm.collective_rpc("weir_graphs")] == live and live[0] == live[1]
