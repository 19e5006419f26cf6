"""KV connectors: what is loaded is exact, and nobody is given keys and values that were made otherwise."""

from __future__ import annotations

import itertools

import pytest

import vllm_weir as weir
from tests.engine.test_steer_cache import shared
from tests.support.engines import close_all, get_llm
from tests.support.machine import needs
from tests.support.offloading import BOUNDED, CONFIG, aborts
from tests.support.steered import check, directory, idle, prompt, sampling, scheduler, tokens, truth, vectors
from vllm_weir.patches import scheduler as core

pytestmark = pytest.mark.engine
THOROUGH = pytest.mark.thorough
P = 100  # three blocks and four tokens
CAPTURE = weir.Capture("resid_post", positions="sampled")
BY_TOKENS, BY_KEYS, BOTH = "by tokens", "by keys", "both"
_seeds = itertools.count(100)


@pytest.fixture(scope="module", autouse=True)
def close_engines():
    yield
    close_all()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


def connect(name, **extra):
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def start(kind, store, **kw):
    from vllm.config import KVTransferConfig

    example = connect("ExampleConnector", shared_storage_path=str(store))
    offloading = connect("OffloadingConnector", **CONFIG)
    several = connect("MultiConnector", connectors=[example, offloading])
    transfer = {BY_TOKENS: example, BY_KEYS: offloading, BOTH: several}[kind] | kw.pop("transfer", {})
    return get_llm(directory(), block_size=32, kv_transfer_config=KVTransferConfig(**transfer), **kw)


@pytest.fixture(scope="module", params=[BY_KEYS, *(pytest.param(kind, marks=THOROUGH) for kind in (BY_TOKENS, BOTH))])
def engine(request, store):
    return request.param, start(request.param, store), truth(directory())


def conditions(d):
    """name -> (interventions, what they do to the prompt's three blocks)."""
    v = vectors(21)
    a, b = 2 * v(d), 2 * v(d)
    return {
        "clean": ([], (0, 0, 0)),
        "A": ([weir.Add(a, 1)], ("A", "A", "A")),
        "B": ([weir.Add(b, 1)], ("B", "B", "B")),
        "A in generation": ([weir.Add(a, 1, positions="generated")], (0, 0, 0)),
        "A from 64": ([weir.Add(a, 1, positions="64:")], (0, 0, "A")),
    }


def run(llm, interventions, ids, capture=CAPTURE, max_tokens=6):
    """The request alone, with nothing in vLLM's own prefix cache."""
    assert llm.reset_prefix_cache()
    params = weir.params(sampling(max_tokens), capture=capture, interventions=interventions)
    (out,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    return out


def quiet(llm):
    """Whether Weir keeps nothing of any request, in the engine core and in the worker."""
    return idle(llm) and not core._states[scheduler(llm)].connectors._requests


def test_every_condition_after_every_other(engine):
    kind, llm, oracle = engine
    every = conditions(oracle.hidden_size)
    for first, second in itertools.product(every, repeat=2):
        ids = tokens(P, next(_seeds))
        check(run(llm, every[first][0], ids), every[first][0], oracle)
        out = run(llm, every[second][0], ids)
        check(out, every[second][0], oracle)
        # A connector that goes by tokens is told of plain requests only.
        plain = not every[first][0] and not every[second][0]
        loaded = 96 if plain else 0
        if kind != BY_TOKENS:
            loaded = max(loaded, shared(every[first][1], every[second][1]))
        assert out.num_cached_tokens == loaded, (first, second)
        assert out.receipt.cached_tokens == loaded
    assert quiet(llm)


def test_plain_requests_are_given_plain_keys_and_values(engine):
    _, llm, oracle = engine
    interventions = conditions(oracle.hidden_size)["A"][0]
    for first in ([], interventions):
        ids = tokens(P, next(_seeds))
        run(llm, first, ids)
        want = oracle.steered_greedy(ids, 6, [])
        for _ in range(2):
            assert llm.reset_prefix_cache()
            (out,) = llm.generate({"prompt_token_ids": ids}, sampling(6), use_tqdm=False)
            assert list(out.outputs[0].token_ids) == want
        assert out.num_cached_tokens == 96


@pytest.mark.parametrize(
    ("positions", "limit"), [("all", 0), ("prompt", 0), ("64:", 64), ("last_prompt", 96), ("generated", 96)]
)
def test_a_hit_ends_before_the_first_wanted_position(engine, positions, limit):
    kind, llm, oracle = engine
    ids = tokens(P, next(_seeds))
    run(llm, [], ids)
    capture = weir.Capture("resid_post", positions=positions)
    for _ in range(2):
        out = run(llm, [], ids, capture)
        check(out, [], oracle)
        # Only the offloading connector can be asked for less than it has.
        assert out.num_cached_tokens == (limit if (kind == BY_KEYS and BOUNDED) or limit == 96 else 0)
        assert out.activations.positions.tolist() == list(wanted(positions, out))


def wanted(positions, out):
    end = P + len(out.outputs[0].token_ids) - 1
    first, last = {
        "all": (0, end), "prompt": (0, P), "64:": (64, end), "last_prompt": (P - 1, P), "generated": (P, end)
    }[positions]  # fmt: skip
    return range(first, last)


def test_a_prompt_of_whole_blocks_is_loaded_but_for_its_last_row(engine):
    kind, llm, oracle = engine
    ids = tokens(96, next(_seeds))
    run(llm, [], ids)
    out = run(llm, [], ids)
    check(out, [], oracle)
    assert out.activations.positions[0] == 95
    assert out.num_cached_tokens == (96 if kind == BY_KEYS else 64)  # vLLM counts the last one, too


def test_loaded_keys_and_values_give_the_rows_that_the_prefix_cache_gives(engine):
    _, llm, _ = engine
    ids = tokens(P, next(_seeds))
    run(llm, [], ids)
    loaded = run(llm, [], ids)
    params = weir.params(sampling(6), capture=CAPTURE)
    (kept,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    assert loaded.num_cached_tokens == kept.num_cached_tokens == 96
    for site in kept.activations.sites:
        assert loaded.activations[site].equal(kept.activations[site])


@THOROUGH
def test_a_mixed_batch(engine):
    """Requests of all kinds at once, again and again: each has its own rows and tokens."""
    _, llm, oracle = engine
    every = [interventions for interventions, _ in conditions(oracle.hidden_size).values()]
    seeds = [next(_seeds) for _ in range(3)]
    prompts = [prompt(P, seed) for seed in seeds for _ in every]
    asked = [interventions for _ in seeds for interventions in every]
    params = [weir.params(sampling(6), capture=CAPTURE, interventions=i) if i else sampling(6) for i in asked]
    want = [oracle.steered_greedy(p["prompt_token_ids"], 6, i) for p, i in zip(prompts, asked, strict=True)]
    for _ in range(3):
        assert llm.reset_prefix_cache()
        outs = llm.generate(prompts, params, use_tqdm=False)
        assert [list(out.outputs[0].token_ids) for out in outs] == want
        for out, interventions in zip(outs, asked, strict=True):
            if interventions:
                check(out, interventions, oracle)
    assert quiet(llm)


def test_gated_requests_are_found_by_nobody(engine):
    _, llm, oracle = engine
    d = oracle.hidden_size
    probe = weir.Probe("often", vectors(3)(d), 0.0, "resid_post", 1, positions="prompt")
    gated = weir.Add(2 * vectors(4)(d), 2, when=weir.When("often", above=0.0))
    ids = tokens(P, next(_seeds))
    params = weir.params(sampling(6), capture=CAPTURE, probes=[probe], interventions=[gated])
    outs = []
    for _ in range(2):
        assert llm.reset_prefix_cache()
        outs += llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        assert outs[-1].num_cached_tokens == 0
    first, again = outs
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    for site in first.activations.sites:
        assert first.activations[site].equal(again.activations[site])
    out = run(llm, [], ids)
    check(out, [], oracle)
    assert out.num_cached_tokens == 0


@THOROUGH
@pytest.mark.parametrize("engine", [pytest.param(BY_KEYS, marks=needs(aborts)), BY_TOKENS, BOTH], indirect=True)
def test_aborted_requests_leave_nothing(engine):
    """Requests are aborted after any number of steps; not before they have blocks where vLLM's own connector fails."""
    kind, llm, oracle = engine
    every = [interventions for interventions, _ in conditions(oracle.hidden_size).values()]
    llm.generate(prompt(P, 3), weir.params(sampling(2), capture=CAPTURE), use_tqdm=False)
    llm.reset_prefix_cache()
    for steps in range(0 if BOUNDED or kind == BY_TOKENS else 2, 12):
        ids = []
        for k in range(10):
            params = weir.params(sampling(20), capture=CAPTURE, interventions=every[k % len(every)])
            ids.append(f"{steps} {k}")
            llm.llm_engine.add_request(ids[-1], prompt(P, 3 + k % 2), params)
        for _ in range(steps):
            llm.llm_engine.step()
        llm.llm_engine.abort_request(ids)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    assert quiet(llm)
    check(run(llm, every[1], tokens(P, 3)), every[1], oracle)
