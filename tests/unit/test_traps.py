"""The mistakes that other libraries make silently, without an engine: numbers as in tests/traps, which has one."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import vllm_weir as weir
from tests.unit.delivery_harness import Post
from tests.unit.frontend.receive.test_delivery import LAYERS, Request
from tests.unit.frontends import frontend_of
from tests.unit.request_strategies import served
from tests.unit.schema.test_lowering import REPLY, Bench, D
from tests.unit.worker.planning.test_planner import COLUMNS, planner_of, spec_of, step
from tests.unit.worker.tap.test_op import recording
from vllm_weir import Site, WeirError
from vllm_weir.compat.vllm_lens.request import to_weir
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.reachable import Media
from vllm_weir.frontend.receive.pending_sequence import InterventionGroup
from vllm_weir.schema.engine_spec import EngineRequest
from vllm_weir.schema.hooks import ALIASES, HOOKS, STREAM_HOOKS, place_of
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import Postprocess, ResolvedSpec
from vllm_weir.schema.rows import CONTINUED
from vllm_weir.schema.taps import STAGES, column_of, tap_of
from vllm_weir.worker.discovery.anchors import Anchor, TensorKey
from vllm_weir.worker.tap.install import place

FACTS = EngineCapabilities(served(4), 4, D, "float32", 1024)


@pytest.fixture
def frontend():
    frontend = frontend_of(FACTS)
    yield frontend
    frontend.close()


# A prompt of 5 tokens. Preempted with nothing, a part and all but one of its tokens in the prefix cache, in one chunk,
# in several, and in chunks of one token, as if it were still generating; and twice.
AGAIN = (
    [(8, 0), (1, 8), (1, 9)],
    [(3, 0), (4, 3), (2, 7), (1, 9)],
    [(4, 4), (1, 8), (1, 9)],
    [(1, 5), (1, 6), (1, 7), (1, 8), (1, 9)],
    [(1, 7), (1, 8), (1, 9)],
    [(8, 0), (1, 8), (7, 2), (1, 9)],
)


def preempted(selector, again):
    """The arena of a worker with a request that was preempted and has gone, and what its caller held meanwhile."""
    post, clock = Post(LAYERS), 0
    request = Request(post, "r0", [("resid_post", "all", selector)], 5, 6, [1] * 11)
    request.join()

    def run(n, at):
        nonlocal clock
        clock += 1
        request.version |= dict.fromkeys(range(at, at + n), clock)
        now = dict(request.version)
        post.step([("r0", n, at)], lambda _, column, p: torch.tensor([column, p, now[p], 0.0]))

    for n, at in [(5, 0), (1, 5), (1, 6), (1, 7)]:
        run(n, at)
    early = request.tracker.view(request.ids[5:9], False, None, 0).activations()
    held = {site: early[site].clone() for site in early.sites}
    post.planner.resume(["r0"])
    for n, at in again:
        run(n, at)
    request.verify()
    assert all(early[site].equal(rows) for site, rows in held.items()), "rows of an earlier output have changed"
    live = len(post.row_seqs.live)
    assert live <= len(post.planner.capturing["r0"].site_sets), "rows of before still have their place"
    post.planner.remove("r0")
    post.step([], None)
    assert not post.row_seqs.live and not len(post.planner.site_sets)
    request.tracker = request.pending = None
    return post.arena


@pytest.mark.parametrize("selector", ["all", "sampled", "generated", [1, 6, -1], "2::2", {"token_ids": [1]}])
def test_trap_06_rows_computed_again_come_once_and_those_handed_out_stay(selector):
    arenas = [preempted(selector, again) for again in AGAIN]
    gc.collect()
    assert not any(arena.used for arena in arenas), "memory that nobody refers to is still held"


@pytest.mark.parametrize(
    ("selector", "again"),
    [
        ("prompt", [(6, 0)]),
        ("prompt", [(2, 0), (4, 2)]),
        ("prompt", [(1, 0), (1, 1), (4, 2)]),
        ("3:6", [(3, 3)]),
        ([3, 5], [(1, 3), (2, 4)]),
    ],
)
def test_trap_06_a_sum_that_was_begun_is_begun_anew(selector, again):
    """Else the rows before the preemption count twice."""
    planner = planner_of(COLUMNS, 8)
    spec = ResolvedSpec(spec_of([("resid_post", [1], selector)]).site_requests, Postprocess("mean"))
    planner.add_capture("r", "a", spec, 6, None, 4)
    (begun,) = step(planner, [("r", 4, 0)]).reductions
    planner.resume(["r"])
    parts = [part for n, at in again for part in step(planner, [("r", n, at)]).reductions]
    assert not begun["done"] and [bool(part["done"]) for part in parts] == [False] * (len(parts) - 1) + [True]
    row_seqs = {part["row_seq"] for part in parts}
    assert row_seqs != {begun["row_seq"]} and len(row_seqs) == 1
    assert [part["resumed"] for part in parts] == [0] + [CONTINUED] * (len(parts) - 1)
    assert parts[-1]["count"] == Positions.parse(selector).mask(np.arange(6), 6).sum()
    assert planner.row_seqs.take_layout_updates()["a"].closed == [begun["row_seq"]]


def test_trap_06_what_was_steered_before_a_preemption_is_vouched_for_anew():
    """What the prefix cache gives then may be another's: this worker looks, and tells what it has found."""
    bench = Bench()
    bench.join("r", [weir.Add(torch.ones(D), 1)], 4, [1, 2, 3, 4])
    for n, at in ((4, 0), (1, 4), (1, 5), (1, 6)):
        bench.programs(["r"], [n], [at])
    bench.planner.resume(["r"])
    plan = bench.planner.plan(["r"], [1], [4])
    assert (plan.programs >= 0).all()
    told = [p + k for _, p, count, _ in plan.steered[REPLY].tolist() for k in range(count)]
    assert sorted(told) == [0, 1, 2, 3, 4]


class Three(torch.nn.Module):
    """Takes the positions first, and returns something of its own beside the two parts of the stream."""

    def __init__(self, kind: type, parts: int) -> None:
        super().__init__()
        self.kind, self.parts = kind, parts

    def forward(self, positions, hidden, residual):
        self.given = hidden + residual
        return self.kind([hidden * 2, residual * 3, positions, None][: self.parts])


CALLS = (
    lambda block, at, h, r: block(at, h, r),
    lambda block, at, h, r: block(at, h, residual=r),
    lambda block, at, h, r: block(at, residual=r, hidden=h),
    lambda block, at, h, r: block(residual=r, positions=at, hidden=h),
)


@pytest.mark.parametrize("steered", [False, True])
@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_trap_07_however_a_block_is_called_and_whatever_it_returns(parts, kind, steered):
    """The stream is read and written before and after it, and what it returns comes back whole.

    Trap 8 too: what is recorded is the sum of both halves, and so is what is written."""
    at, h, r = torch.tensor([3, 4]), torch.arange(6.0).view(2, 3), torch.full((2, 3), 0.5)
    given, left = h + r, 2 * h + 3 * r
    if steered:
        given[1] = left[1] = 9.0
    for call in CALLS:
        block, ranks = Three(kind, parts), {STAGES - 1: 0, 2 * STAGES - 1: 1}
        blends = ((0, 0, 3, 0), (1, 0, 3, 0))
        switch, ring = recording([0, 2], ranks, 2, steered=[1] if steered else [], blends=blends)
        model, into = (
            torch.nn.ModuleDict({"block": block}),
            (TensorKey("arg", 1, "hidden"), TensorKey("arg", 2, "residual")),
        )
        place(model, Anchor("block", "before", *into), 0, switch)
        place(model, Anchor("block", "after", TensorKey("out", 0), TensorKey("out", 1)), 1, switch)
        out = call(block, at, h.clone(), r.clone())
        assert type(out) is kind and len(out) == parts
        assert all(a is b for a, b in zip(out[2:], (at, None), strict=False))
        assert block.given.equal(given) and (out[0] + out[1]).equal(left)
        assert ring[:4:2].equal(given) and ring[1:4:2].equal(left)


def test_trap_09_a_name_means_one_place_in_every_model():
    """`post_attn` is after the addition, and what is done at `pre_attn` comes before attention is."""
    meaning = {"pre_attn": "resid_pre", "post_attn": "resid_mid", "post_block": "resid_post"}
    assert meaning.items() <= ALIASES.items() and set(ALIASES.values()) <= set(HOOKS)
    for alias, hook in meaning.items():
        named = [weir.Capture(name, 2) for name in (alias, hook, f"blocks.2.hook_{hook}")]
        assert len({(c.hook, c.layers) for c in named}) == 1 and named[0].hook == hook
        assert weir.Add(torch.ones(D), 2, hook=alias).hook == hook
    met = sorted([Site(h, layer) for layer in range(3) for h in STREAM_HOOKS[::-1]], key=place_of)
    assert [s.hook for s in met] == [*STREAM_HOOKS] * 3
    assert [column_of(s, False) for s in met] == sorted({column_of(s, False) for s in met}), "a token meets them so"
    for layer in range(1, 3):
        assert tap_of(Site("resid_pre", layer)) == tap_of(Site("resid_post", layer - 1))
        # After the one block's interventions is before the next one's.
        assert column_of(Site("resid_post", layer - 1), False) == column_of(Site("resid_pre", layer), True)
        assert tap_of(Site("resid_pre", layer)) < tap_of(Site("attn_out", layer)) < tap_of(Site("resid_mid", layer))


@pytest.mark.parametrize("cuts", [[9], [3, 3, 3], [5, 1, 3], [1] * 9])
def test_trap_10_generated_tokens_that_come_in_a_prefill_stay_generated(cuts):
    """Their phase is that of their position, and no step's or request's: every position as when it was first met.

    Trap 16 too: what starts in one chunk goes on in the next."""
    bench, at = Bench(), 0
    items = [weir.Add(torch.ones(D) * k, 1, positions=p) for k, p in enumerate(("prompt", "generated", [1, 3]), 1)]
    bench.join("r", items, 4, [1, 2, 3, 4])
    first = [p for n, k in ((4, 0), *((1, k) for k in range(4, 9))) for p in bench.programs(["r"], [n], [k]).tolist()]
    assert len(set(first)) == 3 and len(set(first[4:])) == 1 and first[4] not in first[:4]
    bench.planner.resume(["r"])
    again = []
    for n in cuts:
        again += bench.programs(["r"], [n], [at]).tolist()
        at += n
    assert again == first


def test_trap_10_a_request_that_joins_again_keeps_its_prompt():
    """Runner V2 has a preempted request join again: with what it had generated, which is no part of its prompt."""
    from vllm_weir.patches.worker import _patch_execute_model

    joined = []
    runtime = SimpleNamespace(
        requests=SimpleNamespace(follow=lambda new, finished, resumed, known: joined.extend([*new, known])),
        begin_step=lambda *groups: None,
        steps=SimpleNamespace(end_step=lambda: None),
        parts=SimpleNamespace(
            notifier=SimpleNamespace(note_waiting=lambda count: None),
            functions=SimpleNamespace(note_params=lambda params: None),
        ),
    )
    runner = SimpleNamespace(execute_model=lambda output: None)
    _patch_execute_model(runner, runtime)
    wire = EngineRequest(b"", REPLY)
    new = SimpleNamespace(
        req_id="r",
        sampling_params=SimpleNamespace(extra_args={"weir": wire}),
        prompt_token_ids=[1, 2, 3],
        prefill_token_ids=[1, 2, 3, 8, 9],
        num_computed_tokens=0,
    )
    cached = SimpleNamespace(req_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    output = SimpleNamespace(scheduled_new_reqs=[new], scheduled_cached_reqs=cached, finished_req_ids=set())
    runner.execute_model(output)
    assert joined == [("r", wire, 3, [1, 2, 3], 0), {"r": 5}]


def test_trap_05_sequences_of_one_request_are_each_followed():
    """vLLM hands the same params to all of a request's sequences: every one is admitted from what the caller wrote."""
    from vllm_weir.frontend.pacing import Pacing
    from vllm_weir.patches.frontend import add_request

    seen = []

    class Processor:
        def __init__(self):
            self.request_states = {}
            self._weir_frontend = SimpleNamespace(
                universal=False, served=False, observer=None, admit=self.admit, pacing=Pacing()
            )

        def admit(self, request_id, extra_args, *_):
            seen.append((request_id, copy.deepcopy(extra_args)))
            tracker = SimpleNamespace(name=lambda caller, index: names.append((request_id, caller, index)), held=None)
            return tracker, {"reply": request_id}

        def add_request(self, request, index):
            state = SimpleNamespace(external_req_id="mine", request_index=index)
            self.request_states[request.request_id] = state

    names: list[tuple] = []
    site_request = {"weir": {"v": 1, "capture": [{}]}, "theirs": 1}
    kind = SimpleNamespace(name="FINAL_ONLY")
    params = SimpleNamespace(extra_args=copy.deepcopy(site_request), max_tokens=4, output_kind=kind)
    add, processor = add_request(Processor.add_request, SimpleNamespace(refusal=None)), Processor()
    ids = [f"{k}_mine" for k in range(4)]
    requests = [
        SimpleNamespace(
            request_id=i,
            sampling_params=params,
            prompt_token_ids=[1, 2],
            prompt_embeds=None,
            mm_features=[],
            lora_request=None,
            resumable=False,
        )
        for i in ids
    ]
    for index, request in enumerate(requests):
        add(processor, request, index)
    assert seen == [(i, site_request) for i in ids] and params.extra_args == site_request
    assert names == [(i, "mine", k) for k, i in enumerate(ids)]
    assert [r.sampling_params.extra_args for r in requests] == [{"weir": {"reply": i}, "theirs": 1} for i in ids]
    assert all(state._weir_tracker is not None for state in processor.request_states.values())


def test_trap_11_a_name_is_looked_up_by_what_it_means_now(frontend):
    """In a desk that remembers what it has admitted: other content has another digest, and so other cache keys."""
    site_request = {"weir": {"v": 1, "interventions": [{"op": "add", "vector": {"ref": "name"}, "layers": [1]}]}}
    digests = []
    for value in (1.0, 2.0, 1.0):
        frontend.names.put_vector("name", np.full(D, value, np.float32))
        for _ in range(2):
            (move,) = frontend._admitted(site_request, True).effective
            (row,) = frontend._admitted(site_request, True).rows.values()
            assert row.tolist() == [value] * D
            digests.append((move.digest, *sorted(move.vectors)))
    assert digests[0] == digests[1] == digests[4] == digests[5] and digests[2] == digests[3] != digests[0]


@pytest.mark.parametrize("form", [dict, json.dumps])
def test_requests_that_differ_in_their_tags_alone_share_an_admission(frontend, form):
    asked = {"v": 1, "capture": [{"layers": [1]}]}
    trackers = [frontend.admit(tag, {"weir": form(asked | {"tag": tag})}, [5], 1, 4)[0] for tag in ("a", "b")]
    trackers += [frontend.admit("none", {"weir": form(asked)}, [5], 1, 4)[0], frontend.admit("plain", {}, [5], 1, 4)[0]]
    assert [one.pending.tag for one in trackers] == ["a", "b", "", ""]
    if form is dict:
        assert trackers[0].pending.admitted is trackers[1].pending.admitted is trackers[2].pending.admitted
    with pytest.raises(WeirError, match="a tag is a printable text") as e:
        frontend.admit("wrong", {"weir": form(asked | {"tag": 5})}, [5], 1, 4)
    assert e.value.field == "tag"


ROW = [1.0] * D
WITH_LAYERS = {
    "capture": lambda layers: {"weir": {"v": 1, "capture": [{"layers": layers}]}},
    "hook": lambda layers: {"weir": {"v": 1, "capture": [{"hook": "attn_out", "layers": layers[-1]}]}},
    "add": lambda layers: {"weir": {"v": 1, "interventions": [{"op": "add", "vector": ROW, "layers": layers}]}},
    "lens capture": lambda layers: {"output_residual_stream": layers},
    "lens steering": lambda layers: {
        "apply_steering_vectors": [{"activations": [ROW] * len(layers), "layer_indices": layers, "scale": 1.0}]
    },
}


@pytest.mark.parametrize("ask", WITH_LAYERS.values(), ids=WITH_LAYERS)
@pytest.mark.parametrize(("layers", "why"), [([-1], "from 0"), ([1, -4], "from 0"), ([4], "0..3"), ([0, 99], "0..3")])
def test_trap_12_layers_that_do_not_exist_are_refused_wherever_they_are_named(ask, layers, why):
    """Not dropped, and a negative one is not taken for one from the end: nowhere is it said that it would be."""
    admit(to_weir(ask([0, 3])), FACTS)
    with pytest.raises(WeirError, match=f"block {layers[-1]} does not exist.*{why}") as caught:
        admit(to_weir(ask(layers)), FACTS)
    assert "layer" in caught.value.field or caught.value.field.startswith("output_residual_stream")


def test_trap_12_numbers_that_are_none_are_refused():
    names = {"add": "vector", "replace": "values", "clamp": "direction", "ablate": "directions"}
    for op, name in names.items():
        for bad in (float("nan"), float("inf"), 1e39):
            item = {"op": op, name: [bad, *ROW[1:]], "layers": [1]} | ({"value": 1.0} if op == "clamp" else {})
            with pytest.raises(WeirError, match="NaN or Inf") as caught:
                admit({"weir": {"v": 1, "interventions": [item]}}, FACTS)
            assert caught.value.field == f"interventions[0].{name}"


def test_trap_12_what_does_not_fit_the_tables_fails_and_does_not_run_unsteered():
    bench = Bench(programs=1)
    bench.join("fits", [weir.Add(torch.ones(D), 1)], 2)
    bench.join("does not", [weir.Add(2 * torch.ones(D), 1)], 2)
    plan = bench.planner.plan(["fits", "does not"], [2, 2], [0, 0])
    assert [(reply, name) for reply, name, _ in plan.failures] == [(REPLY, "does not")]
    assert (plan.programs >= 0).tolist() == [True, True, False, False]
    with pytest.raises(WeirError, match="vector"):
        Bench(vectors=1).join("many", [weir.Add(torch.ones(D), 1), weir.Add(2 * torch.ones(D), 1)], 2)


class Keyed(SimpleNamespace):
    """A request as the block hasher sees it."""

    __hash__ = object.__hash__


def keys_of(wire, prompt_len=3, ids=(1, 2, 3), block=3):
    """What the block hasher is given for each block of a request."""
    from vllm_weir.patches.scheduler import block_hash_extra_keys

    keys = block_hash_extra_keys(lambda request, start, end: (None, start), None)
    params = SimpleNamespace(extra_args={"weir": wire})
    request = Keyed(sampling_params=params, num_prompt_tokens=prompt_len, all_token_ids=list(ids))
    return [keys(request, start, start + block) for start in range(0, len(ids), block)]


def test_trap_16_equal_requests_have_equal_forms(frontend):
    """Nothing in what travels to the scheduler tells two equal requests apart, so they share the prefix cache; but that
    the vector comes along with the first, which is in no key."""
    site_request = {"weir": {"v": 1, "interventions": [{"op": "add", "vector": ROW, "layers": [1]}]}}
    wires = [frontend.admit(f"r{k}", copy.deepcopy(site_request), [1, 2, 3], 3, 4)[1] for k in range(2)]
    found = [keys_of(wire)[0] for wire in wires]
    assert found[0] == found[1] and found[0][0] is not None
    assert len(wires[0].vectors) == 1
    wires[0].vectors = {}
    assert wires[0] == wires[1] and not wires[0].cache_salt


def test_trap_16_events_of_the_cache_tell_steerings_apart(frontend):
    """vLLM tells of a tagged key its first field alone."""
    told = set()
    for scale in (1.0, 2.0):
        asked = {"weir": {"v": 1, "interventions": [{"op": "add", "vector": ROW, "layers": [1], "scale": scale}]}}
        (((tag, field),), _), *_ = keys_of(frontend.admit(f"s{scale}", asked, [1, 2, 3], 3, 4)[1])
        told.add(field)
        assert tag == "weir"
    assert len(told) == 2


@pytest.mark.parametrize("positions, own", [([7], 4), (7, 4), ("5:", 4), ("generated", None), ([12, 13], None)])
def test_trap_16_an_image_that_attends_both_ways_shares_no_block_once_something_acts_in_it(positions, own):
    """What is done at its last position changes the keys and values of its first."""
    frontend = frontend_of(FACTS)
    image = Media.of([("image", [(4, 9)])])
    asked = {"weir": {"v": 1, "interventions": [{"op": "add", "vector": ROW, "layers": [1], "positions": positions}]}}

    def blocks(name):
        _, wire = frontend.admit(name, asked, None, 14, 4, media=image)
        return wire.own_from, [key for key, _ in keys_of(wire, 14, [1] * 16, 2)]

    first, causal = blocks("causal")
    assert first is None and causal == blocks("again")[1]
    frontend.engine.traits = replace(frontend.engine.traits, media_both_ways=True)
    (first, one), (_, other) = blocks("one"), blocks("other")
    assert first == own
    shared = 16 if own is None else own
    assert one[: shared // 2] == other[: shared // 2] == causal[: shared // 2]
    assert all(a != b for a, b in zip(one[shared // 2 :], other[shared // 2 :], strict=True))


def generated(*views):
    """The order in which the outputs with these (name, view, what to do then) are handed out."""
    from vllm_weir.patches.frontend import _VIEW, async_llm_generate

    order = []

    async def outputs(self, view):
        yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason="length", **{_VIEW: view})])

    engine = type("Engine", (), {"output_processor": SimpleNamespace(), "generate": async_llm_generate(outputs, None)})

    async def one(name, view, then=lambda: None):
        async for _ in engine().generate(view):
            order.append(name)
            then()

    async def main():
        await asyncio.gather(*(one(*view) for view in views))

    asyncio.run(main())
    return order


def test_trap_17_who_waits_for_a_worker_s_word_holds_up_nobody_in_the_event_loop():
    """It is still on its way when a sequence finishes: the other requests' outputs go on being handed out."""
    frontend = frontend_of(FACTS, timeout=60)
    site_request = {"weir": {"v": 1, "interventions": [{"op": "add", "vector": ROW, "layers": [1]}]}}
    trackers = {name: frontend.admit(name, site_request, [1, 2, 3], 3, 1)[0] for name in ("late", "ready")}

    def arrive(name):
        with frontend.store._changed:
            InterventionGroup(trackers[name].pending.steered, [0]).record(np.array([[0, 3, 1]]))
            frontend.store._changed.notify_all()

    try:
        arrive("ready")
        late, ready = (trackers[name].view([5], False, "length", 0) for name in ("late", "ready"))
        assert generated(("late", late), ("ready", ready, lambda: arrive("late"))) == ["ready", "late"]
    finally:
        frontend.close()


def test_trap_17_plain_requests_that_end_at_the_same_time_go_out_first():
    """Though nothing is left to wait for."""
    view = SimpleNamespace(
        finished=True,
        concluded=lambda: True,
        verify=list,
        settle=lambda: None,
        routing=list,
        pending=SimpleNamespace(trace=None),
    )
    assert generated(("steered", view), ("plain", None), ("plain", None)) == ["plain", "plain", "steered"]
