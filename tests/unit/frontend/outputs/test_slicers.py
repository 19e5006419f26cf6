"""What is handed out when it is looked at is what would have been made at once."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.delivery_harness import Post
from tests.unit.frontend.receive.test_delivery import LAYERS, Request, content, inside, run_one
from tests.unit.frontends import frontend_of
from tests.unit.request_strategies import selectors, served
from vllm_weir import Site, messages
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.lowering import AdmittedIntervention
from vllm_weir.frontend.outputs import slicers
from vllm_weir.frontend.outputs.view import OutputView
from vllm_weir.frontend.receive.pending_sequence import InterventionGroup, PendingSequence, _covers
from vllm_weir.frontend.receive.row_sequence_view import expand_runs
from vllm_weir.frontend.receive.row_store import merge_arrivals
from vllm_weir.frontend.receive.tokens import PromptTokens, SequenceTokens, TokenIds
from vllm_weir.results.site_slices import SiteSlices
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import selected
from vllm_weir.schema.resolved_probes import CellLayout
from vllm_weir.worker.planning.arena import Arena
from vllm_weir.worker.planning.row_sequences import RowSequences

ON = {width: np.array([0, *[1] * (width - 3), 0, 0]) for width in (4, 5)}
"""What a message adds to the one before: the next rank, where a mark has one, and the next position."""
assert messages.MARK_FIELDS[1:] == ("rank", "position", "count", "stride")
assert messages.STEER_FIELDS[1:] == ("position", "count", "stride")


@given(width=st.sampled_from([4, 5]), data=st.data())
def test_marks_of_repeated_messages_are_one(width, data):
    """Messages that go on by one, that do not, that are empty, that drop rows: the same ranks at the same positions."""
    sent = []
    for _ in range(data.draw(st.integers(1, 8))):
        if sent and data.draw(st.booleans()):
            sent.append(sent[-1] + ON[width].astype(np.int32))
            continue
        rows = []
        for number in range(data.draw(st.integers(0, 3))):
            rank = [data.draw(st.integers(-1, 3))] if width == 5 else []
            rows.append([number, *rank, data.draw(st.integers(0, 5)), *data.draw(st.sampled_from([(1, 1), (3, 2)]))])
        sent.append(np.array(rows, np.int32).reshape(-1, width))
    expected = np.concatenate(sent)
    assert each(merge_arrivals(sent)) == each(expected) and len(merge_arrivals(sent)) <= len(expected)


def each(marks):
    """Every marked position, with its number and rank."""
    out = []
    for number, *rank, position, count, stride in marks.tolist():
        lost = bool(rank) and rank[0] < 0
        out += [(number, *(r + (0 if lost else k) for r in rank), position + k * stride) for k in range(count)]
    return sorted(out)


def test_a_hundred_steady_steps_are_one_mark():
    first = np.array([[3, 0, 7, 1, 1], [5, 9, 2, 1, 1]], np.int32)
    assert merge_arrivals([first + ON[5] * k for k in range(100)]).tolist() == [[3, 0, 7, 100, 1], [5, 9, 2, 100, 1]]
    assert merge_arrivals([first[:0]] * 3).shape == (0, 5)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=6))
def test_runs_of_positions_are_spread(runs):
    positions = [p + k * s for p, n, s in runs for k in range(n)]
    marks = np.array(runs, np.int32)
    assert expand_runs(*marks.T).tolist() == positions
    steered = [np.zeros(0, bool)]
    InterventionGroup(steered, [0]).record(marks)
    assert np.flatnonzero(steered[0]).tolist() == sorted(set(positions))


def test_token_ids_are_made_when_asked_for():
    class Watched(list):
        reads = 0

        def __getitem__(self, at):
            Watched.reads += 1
            return super().__getitem__(at)

    one, other = torch.tensor([0, 3]), torch.tensor([4])
    sites = [Site("resid_post", k) for k in range(3)]
    tokens = SequenceTokens(PromptTokens([5, 6, 7]), Watched([8, 9, 10]))
    ids = TokenIds(tokens, {sites[0]: one, sites[1]: one, sites[2]: other})
    assert list(ids) == sites and len(ids) == 3 and not Watched.reads
    assert ids[sites[0]].tolist() == [5, 8] and ids[sites[0]] is ids[sites[1]] and ids[sites[2]].tolist() == [9]
    assert Watched.reads == 1 and len(SequenceTokens(PromptTokens([1]), [])) == 1 == len(
        SequenceTokens(PromptTokens([1]), [2])
    )


def test_a_block_is_cut_when_it_is_looked_at():
    sites = [Site("resid_post", k) for k in range(3)]
    rows = torch.arange(24.0).view(2, 3, 4)
    block = SiteSlices(sites, None, rows)
    assert len(block) == 3 and sites[2] in block and Site("resid_pre", 0) not in block and list(block) == sites
    assert "every" not in vars(block)
    for k, site in enumerate(sites):
        assert block[site].equal(rows[:, k]) and block[site].data_ptr() == rows[0, k].data_ptr()
    swapped = SiteSlices(sites[:2], [2, 0], rows)
    assert swapped[sites[0]].equal(rows[:, 2]) and swapped[sites[1]].equal(rows[:, 0])


def test_memory_is_free_as_soon_as_nobody_holds_the_rows():
    """Without the help of the garbage collector: what is handed out must not refer to itself."""
    post, request = run_one()
    post.planner.remove("r0")
    post.step([], content)
    gc.disable()
    try:
        view = request.view(1)
        acts = view.activations()
        pending = weakref.ref(request.pending)
        row = acts["resid_post", 1]
        request.tracker = request.pending = view = None
        assert pending() is None and post.arena.used > 0 and acts.token_ids.tolist() == [1] * 5
        del acts
        assert post.arena.used > 0, "one tensor is enough"
        del row
        assert post.arena.used == 0
    finally:
        gc.enable()


@given(selector=selectors(), P=st.integers(1, 9), G=st.integers(1, 6), cached=st.integers(0, 12))
def test_every_position_that_is_meant_must_have_been_steered(selector, P, G, cached):
    """Positions that are known to be a stretch are not listed; what is awaited and counted is the same."""
    told = []
    move = SimpleNamespace(per_position=False, positions=Positions.parse(selector))
    pending = SimpleNamespace(
        admitted=SimpleNamespace(interventions=[AdmittedIntervention("add", "resid_post", (move,))]),
        await_steered=lambda number, own, timeout: told.append(own),
    )
    ids = list(range(P + G))
    tokens = SequenceTokens(PromptTokens(ids[:P]), ids[P:])
    view = OutputView(pending, None, tokens, 0, True, False, cached, None, 4, 1.0)
    (((_, changed, shared, *_),),) = view.verify()
    (own,) = told
    own = np.arange(*own) if isinstance(own, tuple) else own
    wanted = selected((Positions.parse(selector),), P, np.array(ids[: P + G - 1]))
    assert own.tolist() == wanted.tolist()
    assert (changed, shared) == ((wanted >= cached).sum(), (wanted < cached).sum())
    steered = np.zeros(P + G, bool)
    assert _covers(steered, told[0]) == (not len(own))
    steered[own] = True
    assert _covers(steered, told[0]) and (not len(own) or not _covers(steered[: own[-1]], told[0]))


def test_whoever_has_nothing_to_wait_for_is_not_made_to():
    """An event loop concludes such a sequence itself; the store is asked, since marks may not have been read yet."""
    asked = []

    def wait(done, timeout):
        asked.append(timeout)
        pending.steered[0] = steered  # the store reads what has come
        return done()

    moves = [SimpleNamespace(per_position=False, positions=Positions.parse(p)) for p in ("prompt", "generated")]
    admitted = SimpleNamespace(
        effective=moves,
        interventions=[AdmittedIntervention("add", "resid_post", tuple(some)) for some in (moves[:1], [], moves[1:])],
        probes=(),
        dose=False,
        cells=CellLayout.of((), ()),
    )
    pending = PendingSequence("r", admitted, [1, 2, 3], SimpleNamespace(wait=wait))
    part = SimpleNamespace(routed=None)
    view = OutputView(pending, part, SequenceTokens(PromptTokens([1, 2, 3]), [4, 5]), 0, True, False, 0, None, 4, 9.0)
    steered = np.array([True, True, False])
    assert not view.concluded() and asked == [0.0], "position 2 has not been steered"
    steered = np.ones(3, bool)
    assert not view.concluded(), "nor has the generated one"
    pending.steered[1] = np.ones(4, bool)
    assert view.concluded()
    view.tickets = [object()]
    assert not view.concluded(), "a sink has rows to take"
    view.tickets, pending.steered[1], pending.failure = (), np.zeros(4, bool), "lost"
    assert view.concluded(), "it is known to have failed"
    pending.failure, view.aborted = None, True
    assert view.concluded()


def test_rows_of_the_prompt_are_cut_before_anybody_asks():
    post = Post(LAYERS)
    asked = {"r0": "last_prompt", "r1": "all", "r2": "0:2", "r3": "prompt"}
    requests = {name: Request(post, name, [("resid_post", "all", p)], 5, 9, [1] * 14) for name, p in asked.items()}
    for request in requests.values():
        request.join()
    for count, at, cut in ((3, 0, ["r2"]), (2, 3, ["r0", "r2", "r3"])):
        post.step([(name, count, at) for name in asked], content)
        early = {name: request.pending.early_activations for name, request in requests.items()}
        assert [name for name, acts in early.items() if acts is not None] == cut
    for name, acts in early.items():
        view = requests[name].view(1, True, None)
        assert (view.activations() is acts) == (acts is not None)
        if acts is not None:
            fresh = view._assemble()
            assert acts.sites == fresh.sites and acts.positions.equal(fresh.positions)
            assert acts.token_ids.equal(fresh.token_ids) and all(acts[s].equal(fresh[s]) for s in acts.sites)
            later = requests[name].view(2, True, None).activations()
            assert later is not acts and not len(later["resid_post", 0]), "later outputs have none of them"
    post.planner.remove("r0")
    requests["r0"].join()  # preempted: all is computed again
    post.step([("r0", 5, 0)], lambda *at: content(*at) + 1)
    again = requests["r0"].rows(2)
    assert again is not early["r0"] and again["resid_post", 0].equal(early["r0"]["resid_post", 0] + 1)


def test_only_sequences_that_got_rows_are_looked_at():
    """Of hundreds that wait, a step serves a few."""
    post, looked = Post(LAYERS), []
    requests = [Request(post, f"r{k}", [("resid_post", "all", "last_prompt")], 5, 1, [1] * 6) for k in range(20)]
    make = post.store.prompt_slicer._slice
    post.store.prompt_slicer._slice = lambda pending: looked.append(pending.request_id) or make(pending)
    for request in requests:
        request.join()
    for request in requests:
        post.step([(request.name, 5, 0)], content)
    assert all(request.pending.early_activations is not None for request in requests)
    assert looked == [request.name for request in requests]


def test_a_long_prompt_lies_in_one_extent():
    """Rows that lie in several are handed out as a copy."""
    arena = Arena(1000)
    row_seqs = RowSequences(arena)
    row_seq = row_seqs.open("r", "a", (0, 1), 240, 241)
    assert len(row_seqs.place(row_seq, 60)) == len(row_seq.extents) == 1 and row_seq.extents[0][2] >= 240


def spill(post):
    """Take all rows out of the worker's memory."""
    post.row_seqs.retire_all()
    post.deliver(post.step([], content, deliver=False)[1], spill=True)
    gc.collect(1)
    assert post.arena.used == 0


def test_rows_from_the_middle_of_a_strip_are_a_run():
    post, request = run_one(G=20)
    request.view(7, True, None)
    acts = request.view(20, True).activations()
    assert acts.positions.tolist() == list(range(11, 24))
    for site in acts.sites:
        assert inside(post, acts[site]) and acts[site][:, 1].tolist() == list(range(11, 24))


def test_early_hand_outs_do_not_hold_a_full_buffer():
    """What has been cut early, and nobody has looked at, is taken out of the worker's memory as the rest is."""
    post, request = run_one([("resid_post", "all", "prompt")])
    assert request.pending.early_activations is not None and post.arena.used > 0
    spill(post)
    assert request.pending.early_activations is None
    assert request.rows(1)["resid_post", 1][:, 1].tolist() == list(range(5))


@pytest.fixture
def at_once(monkeypatch):
    """Rows are cut ahead as soon as they have a place."""
    monkeypatch.setattr(slicers, "DELAY", 0)


@pytest.mark.parametrize("near", [True, False], ids=["mapped", "in messages"])
@pytest.mark.parametrize("compress", [None, "full8"])
@pytest.mark.parametrize("positions", ["all", "2:", "generated", "sampled", "3:9"])
def test_rows_are_cut_before_they_come(at_once, positions, compress, near, monkeypatch):
    """The tensors are there before the rows are; they hold what would have been cut at the end, and are handed out."""
    post, request = run_one([("resid_post", [0, 2], positions)], G=9, end=7, how=compress, near=near)
    (row_view,) = request.pending.row_views
    tensors = dict(row_view.presliced.block.every)
    for p in range(7, 13):
        post.step([("r0", 1, p)], content)
    view = request.view(9)
    monkeypatch.setattr(OutputView, "_assemble", lambda self: pytest.fail("all that is handed out was made before"))
    acts = view.activations()
    monkeypatch.undo()
    got = {site: acts.compressed(site)[0] if compress else acts[site] for site in acts.sites}
    assert {site: id(rows) for site, rows in got.items()} == {site: id(rows) for site, rows in tensors.items()}
    row_view.presliced = None
    fresh = request.rows(9)
    assert acts.sites == fresh.sites and acts.positions.equal(fresh.positions) and acts.token_ids.equal(fresh.token_ids)
    for site, rows in got.items():
        other = fresh.compressed(site)[0] if compress else fresh[site]
        assert rows is not other and rows.equal(other) and len(rows) == len(fresh.positions) > 0
        assert compress or rows[:, 1].tolist() == fresh.positions.tolist()


@pytest.fixture
def foreseen(at_once):
    """A sequence that has ended as foreseen, its last message withheld: (its request, what delivers the message)."""
    post, request = run_one([("resid_post", [0, 2], "all")], G=4, end=7)
    withheld = post.step([("r0", 1, 7)], content, deliver=False)[1]
    return post, request, lambda: post.deliver(withheld)


def test_what_was_cut_is_handed_out_when_all_of_it_is_there(foreseen):
    post, request, deliver = foreseen
    sites = request.pending.memory.spec.sites
    assert request.pending.row_views[0].presliced is not None and request.pending.complete_preslice(sites) is None
    deliver()
    cut = request.pending.complete_preslice(sites)
    assert cut is request.pending.row_views[0].presliced and request.pending.complete_preslice(sites[:1]) is None
    acts = request.rows(4)
    assert all(acts[site] is cut.block[site] and inside(post, acts[site]) for site in sites)
    assert acts.positions.tolist() == list(range(8)) == acts["resid_post", 2][:, 1].tolist()


@pytest.mark.parametrize("why", ["others get them too", "the buffer is nearly full", "they lie elsewhere by now"])
def test_what_was_cut_is_not_handed_out_as_it_is(foreseen, why):
    post, request, deliver = foreseen
    deliver()
    (row_view,) = request.pending.row_views
    cut = row_view.presliced
    if why.startswith("others"):
        request.pending.admitted.__dict__["shared"] = frozenset(request.pending.memory.spec.sites)
    elif why.startswith("the buffer"):
        row_view.mapped.pressure = 0.9
    else:
        row_view.extents[0].rows = row_view.extents[0].rows.clone()
    acts = request.rows(4)
    for site in acts.sites:
        assert not inside(post, acts[site]) and acts[site].equal(cut.block[site])
    assert acts.positions.tolist() == list(range(8))


def test_a_site_without_rows_is_handed_out_beside_those_that_were_cut(at_once):
    _, request = run_one([("resid_post", [0], "all"), ("resid_post", [2], "50:")], G=4)
    acts = request.rows(4)
    assert request.pending.row_views[0].presliced is not None and len(request.pending.row_views) == 1
    assert [tuple(acts[s].shape) for s in acts.sites] == [(8, 4), (0, 4)]


@pytest.mark.parametrize("generated", [1, 2, 5, 8])
def test_a_sequence_that_ends_before_its_time_has_only_its_rows(at_once, generated):
    _, request = run_one(G=9, end=4 + generated)
    assert request.pending.row_views[0].presliced is not None
    for reason in ("stop", "abort"):
        acts = request.view(generated, reason=reason).activations()
        assert all(acts[site][:, 1].tolist() == list(range(4 + generated)) for site in acts.sites)


def test_what_was_cut_is_forgotten_when_the_rows_move(at_once):
    """Rows that are computed again, and rows that are taken out of the worker's memory."""
    post, request = run_one(G=3, end=5)
    assert request.pending.row_views[0].presliced is not None
    post.planner.remove("r0")
    request.join()
    for count, at in ((6, 0), (1, 6)):
        post.step([("r0", count, at)], lambda *at: content(*at) + 1)
    assert request.rows(3)["resid_post", 0][:, 1].tolist() == list(range(1, 8))
    post, request = run_one(G=3)
    assert request.pending.row_views[0].presliced is not None
    spill(post)
    assert request.pending.row_views[0].presliced is None
    assert request.rows(3)["resid_post", 2][:, 1].tolist() == list(range(7))


def test_sequences_are_cut_a_few_at_a_time_once_they_are_under_way():
    post, few = Post(LAYERS), slicers.PER_MESSAGE
    requests = [Request(post, f"r{i}", [("resid_post", [0], "all")], 2, 99, [1] * 101) for i in range(2 * few)]
    for request in requests:
        request.join()
    post.step([(r.name, 2, 0) for r in requests], content)
    for message in range(1, slicers.DELAY + 3):
        cut = sum(request.pending.row_views[0].presliced is not None for request in requests)
        assert cut == max(0, min(2, message + 1 - slicers.DELAY)) * few
        post.step([(r.name, 1, 1 + message) for r in requests], content)


def test_a_sequence_s_strips_are_cut_in_one_go():
    post, request = run_one([("resid_post", [0], "prompt"), ("resid_post", [2], "generated")], G=99, end=5)
    for message in range(1, slicers.DELAY + 1):
        post.step([("r0", 1, 4 + message)], content)
        assert len(post.store.preslicer._queue) == (message + 1 < slicers.DELAY)
    assert [row_view.presliced is not None for row_view in request.pending.row_views] == [True, True]


def test_sequences_that_have_gone_leave_nothing_behind():
    """Hundreds of short requests a step: more than are cut."""
    post = Post(LAYERS, rows=20000)
    for turn in range(slicers.DELAY + 4):
        names = [f"r{turn}_{i}" for i in range(3 * slicers.PER_MESSAGE)]
        requests = [Request(post, name, [("resid_post", [0], "all")], 2, 2, [1] * 4) for name in names]
        for request in requests:
            request.join()
        post.step([(name, 2, 0) for name in names], lambda *at: torch.zeros(4))
        for name in names:
            post.planner.remove(name)
        del requests, request
        assert len(post.store.preslicer._queue) <= 3 * slicers.PER_MESSAGE * slicers.DELAY


def test_whose_rows_are_cut_ahead():
    """Requests without outputs before the last whose rows are handed out as the worker sends them."""
    found, frontend = {}, frontend_of(EngineCapabilities(served(LAYERS), LAYERS, 4, "float32", 1000))
    packed, cast = {"compress": "full8"}, {"dtype": "bfloat16"}
    for name, more in {
        "plain": {}, "packed": packed, "cast": cast, "packed and cast": packed | cast, "reduced": {"reduce": "mean"},
        "of the prompt": {"positions": "prompt"},
    }.items():  # fmt: skip
        for streams in (False, True):
            extra = {"weir": {"v": 1, "capture": [{"hook": "resid_post"} | more]}}
            tracker, _ = frontend.admit(f"{name} {streams}", extra, [1, 2, 3], 3, 8, streams)
            found[name, streams] = tracker.pending.expected_end
    frontend.close()
    assert {key for key, end in found.items() if end} == {
        (one, False) for one in ("plain", "packed", "packed and cast")
    }
    assert set(found.values()) == {0, 10}
