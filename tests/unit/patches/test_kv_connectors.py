"""Between a scheduler and its KV connector: who is told of what, and what is answered."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

from vllm_weir.core.cache_keys import ExternalKV
from vllm_weir.patches import kv_connectors
from vllm_weir.patches.kv_connectors import (
    RELOADED,
    ConnectorGuard,
    Kind,
    connectors_of,
    kind_of,
    unknown_connector,
    without,
)

P = 10
CAPTURES = ExternalKV(limit=4)
LATE = ExternalKV(limit=P - 1)
STEERS = ExternalKV(changed=True, prompt_changed=True)
STEERS_LATE = ExternalKV(changed=True)
PLAIN = None


class Connector:
    """Has `found` tokens for every request, and notes what it is told."""

    def __init__(self, found=(8, False)):
        self.found, self.told, self.shown = found, [], None

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.told.append(("get", request.request_id))
        return self.found

    def on_new_request(self, request):
        self.told.append(("new", request.request_id))

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.told.append(("alloc", request.request_id))

    def build_connector_meta(self, scheduler_output):
        self.shown = scheduler_output
        return "meta"

    def request_finished(self, request, block_ids):
        self.told.append(("finished", request.request_id))
        return True, {"where": block_ids}


def connector(name, *args):
    """An instance of a class of vLLM's of this name."""
    return type(name, (Connector,), {"__module__": "vllm.connectors"})(*args)


def make(monkeypatch, *connectors, recompute=False, group="FullAttentionSpec", **more):
    """A guarded scheduler with these connectors; a request's `extra` is what it may take and leave."""
    outer = connectors[0]
    if len(connectors) > 1:
        outer = type("MultiConnector", (), {})()
        outer._connectors = list(connectors)
    spec = type(group, (), {})()
    scheduler = SimpleNamespace(
        connector=outer,
        recompute_kv_load_failures=recompute,
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)]),
        _handle_invalid_blocks=lambda *_: {"lost", "plain"},
        **more,
    )
    monkeypatch.setattr(ExternalKV, "of", classmethod(lambda _cls, wish, _prompt: wish))
    return scheduler, ConnectorGuard(scheduler)


def request(name="r", params=None, max_tokens=1):
    return SimpleNamespace(
        request_id=name,
        num_prompt_tokens=P,
        num_tokens=P,
        all_token_ids=list(range(P)),
        kv_transfer_params=params,
        max_tokens=max_tokens,
        cache_salt=None,
    )


def entered(guard, kv, **more):
    one = request(**more)
    if kv is not PLAIN:
        guard.enter(one, kv)
    return one


@pytest.mark.parametrize(
    ("name", "answers"),
    {
        # what is answered to: plain, captures from 4, captures the last, steers, steers generated
        "OffloadingConnector": (8, 0, 8, 8, 8),
        "LMCacheConnectorV1": (8, 0, 8, 0, 0),
        "NixlConnector": (8, 0, 8, 0, 8),
        "MoRIIOConnector": (8, 0, 8, 0, 8),
        "SomebodysConnector": (8, 0, 8, 0, 0),
    }.items(),
)
def test_answers(monkeypatch, name, answers):
    for kv, answer in zip((PLAIN, CAPTURES, LATE, STEERS, STEERS_LATE), answers, strict=True):
        for is_async in (False, True):
            inner = connector(name, (8, is_async))
            _, guard = make(monkeypatch, inner)
            one = entered(guard, kv)
            assert inner.get_num_new_matched_tokens(one, 0) == (answer, is_async and answer > 0)
            inner.found = (None, False)
            assert inner.get_num_new_matched_tokens(one, 0)[0] in ((None,) if answer or kv is CAPTURES else (0,))


def test_loads_in_a_step_that_may_have_to_be_repeated(monkeypatch):
    for is_async in (False, True):
        inner = connector("OffloadingConnector", (8, is_async))
        _, guard = make(monkeypatch, inner, recompute=True)
        assert inner.get_num_new_matched_tokens(entered(guard, LATE), 0) == (8 * is_async, is_async)
        assert inner.get_num_new_matched_tokens(request("plain"), 0) == (8, is_async)


def output(*names, finished=()):
    """vLLM's, of one new request and the others running."""
    cached = SimpleNamespace(
        req_ids=list(names[1:]),
        resumed_req_ids=set(names[1:]),
        new_token_ids=[],
        all_token_ids={name: [1] for name in names[1:]},
        new_block_ids=[([name],) for name in names[1:]],
        num_computed_tokens=list(range(len(names) - 1)),
    )
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=names[0])],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=dict.fromkeys(names, 2),
        total_num_scheduled_tokens=2 * len(names),
        scheduled_spec_decode_tokens={names[0]: [3]},
        scheduled_encoder_inputs={},
        finished_req_ids=set(finished),
        preempted_req_ids={names[-1]},
    )


def test_a_connector_by_tokens_is_not_told_of_steered_requests(monkeypatch):
    inner = connector("ExampleConnector")
    _, guard = make(monkeypatch, inner)
    for kv, name in ((STEERS, "a"), (PLAIN, "b"), (CAPTURES, "c"), (STEERS_LATE, "d")):
        one = entered(guard, kv, name=name)
        inner.on_new_request(one)
        inner.get_num_new_matched_tokens(one, 0)
        inner.update_state_after_alloc(one, (), 0)
    assert {name for _, name in inner.told} == {"b", "c"}
    given = output("a", "b", "c", "d", finished=["d"])
    before = copy.deepcopy(given)
    assert inner.build_connector_meta(given) == "meta"
    assert given == before  # the workers' is untouched
    shown = inner.shown
    assert shown.num_scheduled_tokens == {"b": 2, "c": 2} and shown.total_num_scheduled_tokens == 4
    assert not shown.scheduled_new_reqs and not shown.scheduled_spec_decode_tokens and not shown.preempted_req_ids
    assert shown.finished_req_ids == {"d"}  # connectors forget those they do not know
    cached = shown.scheduled_cached_reqs
    assert cached.req_ids == ["b", "c"] and cached.new_block_ids == [(["b"],), (["c"],)]
    assert cached.num_computed_tokens == [0, 1] and cached.new_token_ids == []
    assert cached.resumed_req_ids == {"b", "c"} == set(cached.all_token_ids)
    guard.leave(given)
    assert inner.build_connector_meta(output("d")) == "meta"
    assert set(inner.shown.num_scheduled_tokens) == {"d"}  # forgotten: a later request may have its name


def test_others_are_shown_everything(monkeypatch):
    inner = connector("OffloadingConnector")
    _, guard = make(monkeypatch, inner)
    one = entered(guard, STEERS, name="a")
    inner.on_new_request(one)
    given = output("a", "b")
    inner.build_connector_meta(given)
    assert inner.shown is given and inner.told == [("new", "a")]


def test_without_nothing_hidden_among_the_running():
    given = output("a", "b")
    assert without(given, {"a"}).scheduled_cached_reqs is given.scheduled_cached_reqs


def test_connectors_in_a_multi_connector_are_guarded_each_for_itself(monkeypatch):
    tokens, keys = connector("ExampleConnector"), connector("OffloadingConnector")
    _, guard = make(monkeypatch, tokens, keys)
    one = entered(guard, STEERS)
    assert tokens.get_num_new_matched_tokens(one, 0) == (0, False)
    assert keys.get_num_new_matched_tokens(one, 0) == (8, False)
    given = output("r", "b")
    for inner, shown in ((tokens, {"b"}), (keys, {"r", "b"})):
        inner.build_connector_meta(given)
        assert set(inner.shown.num_scheduled_tokens) == shown


PREFILL, DECODE = {"do_remote_decode": True}, {"do_remote_prefill": True, "remote_block_ids": [1]}


P_TO_D = ("NixlConnector", "MooncakeConnector", "MoRIIOConnector")
NIXL, MORIIO = P_TO_D[0], P_TO_D[2]


@pytest.mark.parametrize(
    ("name", "kv", "params", "max_tokens", "kept", "more"),
    [
        # A prefill engine hands over what it did not change,
        *((name, kv, PREFILL, 1, kv is not STEERS, {}) for name in P_TO_D for kv in (CAPTURES, STEERS, STEERS_LATE)),
        *((name, STEERS_LATE, PREFILL, 2, False, {}) for name in P_TO_D),
        *((name, PLAIN, PREFILL, 1, True, {}) for name in P_TO_D),
        # and no prompt that would lose its last token.
        *(
            (NIXL, CAPTURES, params, 1, params is DECODE, more)
            for more in ({"group": "MambaSpec"}, {"num_prefill_lookahead": 3}, {"prefix_replay_tokens": 8})
            for params in (PREFILL, DECODE)
        ),
        # A decode engine that computes the prompt: NIXL is told that 0 tokens are loaded, and says so to the other one.
        *((NIXL, kv, DECODE, 1, True, {}) for kv in (CAPTURES, STEERS)),
        *((MORIIO, kv, DECODE, 1, False, {}) for kv in (CAPTURES, STEERS)),
        *((MORIIO, kv, DECODE, 1, True, {}) for kv in (LATE, STEERS_LATE)),
    ],
)
def test_what_engines_hand_over(monkeypatch, name, kv, params, max_tokens, kept, more):
    _, guard = make(monkeypatch, connector(name), **more)
    one = entered(guard, kv, params=dict(params), max_tokens=max_tokens)
    assert one.kv_transfer_params == (params if kept else None)


def test_a_decode_engine_does_not_say_where_steered_blocks_lie(monkeypatch):
    inner = connector("NixlConnector")
    _, guard = make(monkeypatch, inner)
    for kv, params, told in (
        (STEERS, DECODE, None),
        (STEERS_LATE, None, None),
        (STEERS_LATE, PREFILL, {"where": [1]}),
        (CAPTURES, DECODE, {"where": [1]}),
        (PLAIN, DECODE, {"where": [1]}),
    ):
        one = entered(guard, kv, params=params)
        assert inner.request_finished(one, [1]) == (True, told)  # its blocks stay as long as vLLM says
        guard.leave(output("x", finished=["r"]))


def test_a_salted_connector(monkeypatch):
    monkeypatch.setattr(kv_connectors, "_salts", lambda _name: True)
    inner = connector("LMCacheMPConnector")
    _, guard = make(monkeypatch, inner)
    salts = [entered(guard, kv).cache_salt for kv in (STEERS, STEERS_LATE, CAPTURES)]
    assert salts[2] is None and salts[0] != salts[1] and all(len(salt) == 32 for salt in salts[:2])
    assert inner.get_num_new_matched_tokens(entered(guard, STEERS), 0) == (8, False)
    monkeypatch.setattr(kv_connectors, "_salts", lambda _name: False)
    assert kind_of("LMCacheMPConnector", None) is Kind.UNKNOWN


def test_the_offloading_connector_is_asked_for_what_a_capture_leaves_it(monkeypatch):
    _, guard = make(monkeypatch, connector("OffloadingConnector"))
    assert entered(guard, CAPTURES, params={"x": 1}).kv_transfer_params == {"x": 1, "max_load_tokens": 4}
    assert entered(guard, LATE).kv_transfer_params is None
    _, guard = make(monkeypatch, connector("OffloadingConnector"), connector("NixlConnector"))
    assert entered(guard, CAPTURES).kv_transfer_params is None  # the other would take it for its own


@pytest.mark.parametrize(("own", "asked"), [(0, 0), (2, 2), (7, 4), (-1, 4), (True, 4), ("2", 4)])
def test_a_smaller_load_limit_of_the_caller_holds(monkeypatch, own, asked):
    _, guard = make(monkeypatch, connector("OffloadingConnector"))
    request = entered(guard, CAPTURES, params={"max_load_tokens": own})
    assert request.kv_transfer_params == {"max_load_tokens": asked}


def test_requests_that_go_back_are_told_to_the_workers_once(monkeypatch):
    scheduler, guard = make(monkeypatch, connector("OffloadingConnector"), recompute=True)
    entered(guard, LATE, name="lost")
    assert scheduler._handle_invalid_blocks({3}, {}) == {"lost", "plain"}
    for want in (["lost"], None):
        given = output("x")
        guard.leave(given)
        assert getattr(given, RELOADED, None) == want


def config(name, module=None, **extra):
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector=name, kv_connector_module_path=module, kv_connector_extra_config=extra
        )
    )


def test_which_connectors_are_not_known():
    assert unknown_connector(SimpleNamespace(kv_transfer_config=None)) == ""
    assert unknown_connector(config("NixlConnector")) == ""
    assert unknown_connector(config("NixlConnector", "mine.nixl")) == "NixlConnector"
    assert unknown_connector(config("LMCacheConnectorV1Dynamic", "lmcache.integration.vllm")) == ""
    assert unknown_connector(config("FlexKVConnectorV1")) == "FlexKVConnectorV1"
    inner = [{"kv_connector": "NixlConnector"}, {"kv_connector": "Own", "kv_connector_module_path": "own"}]
    several = config("MultiConnector", connectors=inner)
    assert connectors_of(several) == [("NixlConnector", None), ("Own", "own")]
    assert unknown_connector(several) == "Own"
