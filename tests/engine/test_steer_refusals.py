"""What is refused, what waits, and what fails loudly when a worker cannot do as asked."""

from __future__ import annotations

import base64
import dataclasses

import pytest
import torch

import vllm_weir as weir
from tests.support.engines import get_llm
from tests.support.measure import close_products
from tests.support.steered import (
    check,
    chunks,
    directory,
    generated,
    idle,
    prompt,
    sampling,
    scheduler,
    tokens,
    truth,
    usage,
    vectors,
)
from vllm_weir.frontend.admission import engine_wire
from vllm_weir.worker.planning import row_sequences
from vllm_weir.worker.planning.planner import Planner
from vllm_weir.worker.planning.row_sequences import RowSequences
from vllm_weir.worker.steering.vector_fetch import VectorFetcher
from vllm_weir.worker.transfer.notifier import Notifier

pytestmark = pytest.mark.engine
ROWS = 8
# 8 vectors of 128 float32, blocks 1 and 2 only, and little patience.
SMALL = {
    "block_size": 32,
    "max_num_seqs": 64,
    "additional_config": {"weir": {"layers": [1, 2], "vector_bytes": ROWS * 4 * 128, "timeout": 2.0}},
}
D = 128
GOOD = torch.ones(D)


@pytest.fixture(scope="module")
def engine():
    model_dir = directory()
    return get_llm(model_dir, **SMALL), truth(model_dir)


def raw(**changes):
    return {"op": "add", "vector": weir.Add(GOOD).vector.to_json(), "layers": [1]} | changes


def inline(data, dtype="float32", shape=(D,)):
    return {"b64": data, "dtype": dtype, "shape": list(shape)}


def base(array):
    return base64.b64encode(array.numpy().tobytes()).decode()


REFUSED = {
    "nan": (raw(vector=inline(base(torch.full((D,), float("nan"))))), "interventions[0].vector"),
    "inf": (raw(vector=[float("inf")] * D), "interventions[0].vector"),
    "wrong width": (raw(vector=[1.0] * (D + 1)), "interventions[0].vector"),
    "layer out of range": (raw(layers=[1, 4]), "interventions[0].layers"),
    "negative layer": (raw(layers=-1), "interventions[0].layers"),
    "10,001 rows": (raw(vector=[[1.0]] * 10_001), "interventions[0].vector"),
    "unknown name": (raw(vector={"ref": "nobody"}), "interventions[0].vector"),
    "garbage": (raw(vector=inline("$$$$")), "interventions[0].vector.b64"),
    "truncated": (raw(vector=inline(base(GOOD)[:-4])), "interventions[0].vector.b64"),
    "untapped": (raw(layers=[3]), "interventions[0].layers"),
    "untapped all": (raw(layers="all"), "interventions[0].layers"),
    "unknown op": (raw(op="shout"), "interventions[0].op"),
    "no op": ({"vector": [1.0] * D}, "interventions[0].op"),
    "unknown key": (raw(volume=3), "interventions[0].volume"),
    "path": (raw(path="x"), "interventions[0].path"),
    "unknown vector key": (raw(vector={"b64": "", "size": 1}), "interventions[0].vector.size"),
    "two embeddings": (raw(hook="embed", layers=[1]), "interventions[0].layers"),
    "missing vector": ({"op": "add", "layers": [1]}, "interventions[0].vector"),
    "too many vectors": (
        raw(vector=torch.randn(ROWS + 1, D).tolist(), positions=list(range(ROWS + 1))),
        "interventions",
    ),
    "fewer rows than positions": (raw(vector=[[1.0] * D] * 2, positions=[9, 4, 5]), "interventions[0].positions"),
    "rows at positions without an end": (raw(vector=[[1.0] * D] * 3), "interventions[0].positions"),
    "more rows than positions": (raw(vector=[[1.0] * D] * 3, positions=[9, 4]), "interventions[0].positions"),
    "rows, a position named twice": (raw(vector=[[1.0] * D] * 2, positions=[5, 5]), "interventions[0].positions"),
    "rows, a position before the prompt": (
        raw(vector=[[1.0] * D] * 2, positions=[-200, 1]),
        "interventions[0].positions",
    ),
    "zero direction": ({"op": "ablate", "directions": [0.0] * D, "layers": 1}, "interventions[0].directions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_it_enters(engine, name):
    llm, oracle = engine
    item, field = REFUSED[name]
    params = sampling(3)
    params.extra_args = {"weir": {"v": 1, "interventions": [item]}}
    with pytest.raises(weir.WeirError) as caught:
        llm.generate(prompt(9), params, use_tqdm=False)
    assert caught.value.field == field and field in str(caught.value)
    (out,) = llm.generate(prompt(9), sampling(3), use_tqdm=False)
    assert list(out.outputs[0].token_ids) == oracle.greedy(tokens(9), 3)


def test_more_rows_than_positions_are_refused_for_every_request(engine):
    llm, _ = engine
    with pytest.raises(weir.WeirError, match="3 rows for 2 positions") as caught:
        weir.set_global(llm, weir.Replace(torch.ones(3, D), 1, positions=[9, 4]))
    assert caught.value.field.endswith(".positions")


@pytest.mark.parametrize("positions, count", [("prompt", 9), ("2:-1", 6), ("-4:6", 1), (":-2:2", 4)])
def test_rows_that_are_not_as_many_as_a_prompt_s_positions_are_refused(engine, positions, count):
    llm, oracle = engine
    for rows in {2, count - 1, count + 1, 60} - {0, 1, count}:
        case = [weir.Replace(torch.ones(rows, D), 1, positions=positions)]
        with pytest.raises(weir.WeirError, match=f"{rows} rows for {count} positions with a prompt of 9") as caught:
            llm.generate(prompt(9), weir.params(sampling(3), interventions=case), use_tqdm=False)
        assert caught.value.field == "interventions[0].positions"
    fits = [weir.Replace(torch.ones(count, D), 1, positions=positions)]
    (out,) = llm.generate(
        prompt(9), weir.params(sampling(3), capture=weir.Capture("resid_post", 1), interventions=fits), use_tqdm=False
    )
    check(out, fits, oracle)


def test_10_001_interventions_are_refused(engine):
    llm, _ = engine
    params = sampling(3)
    params.extra_args = {"weir": {"v": 1, "interventions": [raw()] * 10_001}}
    with pytest.raises(weir.WeirError) as caught:
        llm.generate(prompt(9), params, use_tqdm=False)
    assert caught.value.field == "interventions"


def test_one_bad_request_among_good_ones_leaves_nothing(engine):
    llm, oracle = engine
    bad = sampling(3)
    bad.extra_args = {"weir": {"v": 1, "interventions": [raw(layers=[9])]}}
    good = weir.params(sampling(3), interventions=weir.Add(GOOD, 1))
    with pytest.raises(weir.WeirError):
        llm.generate([prompt(9, k) for k in range(3)], [good, bad, good], use_tqdm=False)
    (out,) = llm.generate(prompt(9), sampling(3), use_tqdm=False)
    assert list(out.outputs[0].token_ids) == oracle.greedy(tokens(9), 3)
    assert idle(llm)


def waiting_cases(v):
    """Four vectors each: two requests fill the table."""
    return [
        [weir.Ablate(v(2, D), 1), weir.Add(v(D), 2, 2.0), weir.Add(v(D), 1, positions="generated")] for _ in range(8)
    ]


def test_a_full_table_lets_requests_wait(engine):
    llm, oracle = engine
    cases = waiting_cases(vectors(31))
    capture = [weir.Capture("resid_post", [1, 2])]
    params = [weir.params(sampling(4 + k % 3), capture=capture, interventions=c) for k, c in enumerate(cases)]
    prompts = [prompt(12 + k, 70 + k) for k in range(8)]
    alone = [llm.generate(p, s, use_tqdm=False)[0] for p, s in zip(prompts, params, strict=True)]
    core, seen = scheduler(llm), []
    schedule = core.schedule

    def watch(*args, **kwargs):
        out = schedule(*args, **kwargs)
        seen.append(sum("weir" in (r.sampling_params.extra_args or {}) for r in core.running))
        held = llm.collective_rpc("weir_usage")[0]
        assert held["vectors"] <= ROWS
        return out

    core.schedule = watch
    try:
        plain = sampling(5)
        outs = llm.generate([*prompts, prompt(9)], [*params, plain], use_tqdm=False)
    finally:
        del core.schedule
    assert max(seen) == 2
    for out, one, case in zip(outs, alone, cases, strict=False):
        check(out, case, oracle)
        assert out.outputs[0].token_ids == one.outputs[0].token_ids
    assert list(outs[-1].outputs[0].token_ids) == oracle.greedy(tokens(9), 5)
    assert idle(llm), usage(llm)


def test_requests_that_share_vectors_do_not_wait(engine):
    llm, _oracle = engine
    case = waiting_cases(vectors(32))[0]
    core, seen = scheduler(llm), []
    schedule = core.schedule

    def watch(*args, **kwargs):
        out = schedule(*args, **kwargs)
        seen.append(len(core.running))
        return out

    core.schedule = watch
    try:
        outs = llm.generate(
            [prompt(12, k) for k in range(8)], weir.params(sampling(4), interventions=case), use_tqdm=False
        )
    finally:
        del core.schedule
    assert max(seen) == 8 and len(outs) == 8
    assert idle(llm)


def test_waiting_requests_can_be_aborted(engine):
    llm, oracle = engine
    cases = waiting_cases(vectors(33))
    lowlevel = llm.llm_engine
    for k, case in enumerate(cases):
        params = weir.params(sampling(6), capture=weir.Capture("resid_post", 1), interventions=case)
        lowlevel.add_request(f"w{k}", prompt(10, 80 + k), params)
    lowlevel.step()
    lowlevel.abort_request(["w0", "w4", "w5"])  # one that runs, two that wait
    done = {}
    for _ in range(200):
        if not lowlevel.has_unfinished_requests():
            break
        done |= {o.request_id: o for o in lowlevel.step() if o.finished}
    assert not lowlevel.has_unfinished_requests()
    left = {name for name, o in done.items() if o.outputs[0].finish_reason == "length"}
    assert left == {"w1", "w2", "w3", "w6", "w7"}
    for name in left:
        check(done[name], cases[int(name[1:])], oracle)
    assert idle(llm), usage(llm)


def test_words_of_steering_that_never_come_fail_the_request(engine, monkeypatch):
    llm, oracle = engine
    steered = weir.params(sampling(3), interventions=weir.Add(GOOD, 1))
    with monkeypatch.context() as patch:
        send = Notifier.send
        patch.setattr(Notifier, "send", lambda self, parcel: send(self, dataclasses.replace(parcel, steered={})))
        with pytest.raises(weir.WeirError, match="confirmed"):
            generated(llm, prompt(9), steered)
    after(llm, oracle, steered)


def test_vectors_come_along_and_are_asked_for_only_where_that_was_not_so(engine, monkeypatch):
    llm, oracle = engine
    asked, query = [], VectorFetcher._query

    def recorded(self, endpoint, digests):
        asked.append(digests)
        return query(self, endpoint, digests)

    monkeypatch.setattr(VectorFetcher, "_query", recorded)

    def steered(*seeds):
        moves = [weir.Add(vectors(seed)(D), 1) for seed in seeds]
        params = weir.params(sampling(3), capture=weir.Capture("resid_post", [1, 2]), interventions=moves)
        check(llm.generate(prompt(9), params, use_tqdm=False)[0], moves, oracle)

    steered(60)
    directions = torch.randn(2, D)
    scores = weir.params(sampling(1), capture=weir.Capture("resid_post", 1, project=directions))
    (out,) = llm.generate(prompt(9), scores, use_tqdm=False)
    rows, _ = oracle.steered(tokens(9), 9, [])
    assert close_products(out.activations["resid_post", 1], rows["resid_post", 1], directions)
    assert not asked
    monkeypatch.setattr(engine_wire, "MAX_BYTES", 4 * D)
    steered(61, 62)
    assert [len(digests) for digests in asked] == [2], "too many to come along"
    monkeypatch.setattr(engine_wire.InlineVectors, "of", lambda *_: {})
    for seed in range(63, 63 + ROWS):
        steered(seed)
    assert len(asked) == 1 + ROWS
    steered(60)
    assert len(asked) == 2 + ROWS, "it had to make room in the table"


def nobody_answers(*_args):
    raise ValueError("nobody answers")


@pytest.mark.parametrize("failing", [(VectorFetcher, "fetch"), (Planner, "plan")], ids=["fetch", "plan"])
def test_a_request_that_cannot_be_done_fails(engine, monkeypatch, failing):
    """For want of its vector, or of a plan; neighbours do not keep the engine from going on."""
    llm, oracle = engine
    for seed, texts, asked in ((34, 1, []), (35, 3, [sampling(6), sampling(2)])):
        fresh = weir.params(sampling(3), interventions=weir.Add(vectors(seed)(D), 1))
        with monkeypatch.context() as patch:
            patch.setattr(*failing, nobody_answers)
            with pytest.raises(weir.WeirError, match="nobody answers"):
                generated(llm, [prompt(9, k) for k in range(texts)], [*asked[:1], fresh, *asked[1:]])
        after(llm, oracle, fresh)


@pytest.mark.parametrize("how", ["fetch", "confirm"])
def test_what_a_failed_request_left_in_the_prefix_cache_is_not_shared(engine, monkeypatch, how):
    """Its KV lies under the key of steering that was not done: to ask again would be served from it."""
    llm, _ = engine
    fresh = weir.params(sampling(3), interventions=weir.Add(vectors(36 + len(how))(D), 1))
    llm.reset_prefix_cache()
    with monkeypatch.context() as patch:
        if how == "fetch":
            patch.setattr(VectorFetcher, "fetch", nobody_answers)
        else:
            send = Notifier.send
            patch.setattr(Notifier, "send", lambda self, parcel: send(self, dataclasses.replace(parcel, steered={})))
        with pytest.raises(weir.WeirError):
            generated(llm, prompt(70), fresh)
    (again,) = llm.generate(prompt(70), fresh, use_tqdm=False)
    assert again.num_cached_tokens == 0 and again.receipt.steered == ({("resid_post", 1): 72},)
    (shares,) = llm.generate(prompt(70), fresh, use_tqdm=False)
    assert shares.num_cached_tokens == 64 and shares.outputs[0].token_ids == again.outputs[0].token_ids


def test_what_a_failed_request_left_is_not_given_to_those_already_waiting(engine, monkeypatch):
    """They were admitted under the same keys, before anybody could know."""
    llm, oracle = engine
    v = vectors(39)
    bad, other = [weir.Add(v(D), 1, 3.0)], [weir.Add(v(D), 1, 3.0)]
    digest = next(iter(bad[0].lower((D,), lambda *_: None).rows))
    fetch, failed = VectorFetcher.fetch, []

    def fail_once(self, reply, digests):
        if digest in digests and not failed:
            failed.append(digest)
            raise ValueError("nobody answers")
        return fetch(self, reply, digests)

    lowlevel, done = llm.llm_engine, {}
    cases = {"fails": bad, "equal": bad, "longer": bad, "other vector": other, "other prompt": bad, "plain": []}
    given = {name: prompt(70) for name in cases} | {"other prompt": prompt(70, 5), "longer": prompt(90)}
    with monkeypatch.context() as patch, chunks(llm, 70):
        patch.setattr(VectorFetcher, "fetch", fail_once)
        for name, case in cases.items():
            params = weir.params(sampling(3), capture=weir.Capture("resid_post", 2, "sampled"), interventions=case)
            lowlevel.add_request(name, given[name], params)
        while lowlevel.has_unfinished_requests():
            done |= {out.request_id: out for out in lowlevel.step() if out.finished}
    with pytest.raises(weir.WeirError, match="nobody answers"):
        done.pop("fails").receipt  # noqa: B018 - a property that waits
    for name in ("equal", "longer"):
        with pytest.raises(weir.WeirError, match="send it again"):
            done.pop(name).receipt  # noqa: B018 - as above
    for name, out in done.items():
        check(out, cases[name], oracle)
    again = weir.params(sampling(3), capture=weir.Capture("resid_post", 2, "sampled"), interventions=bad)
    check(llm.generate(prompt(70), again, use_tqdm=False)[0], bad, oracle)


def test_a_request_that_took_nothing_from_the_cache_outlives_an_equal_one_that_failed(engine, monkeypatch):
    """Its keys are those of what the other has left, but it has computed all of its positions itself."""
    llm, oracle = engine
    case = [weir.Add(vectors(40)(D), 1, 3.0)]
    params = weir.params(sampling(40), capture=weir.Capture("resid_post", 2), interventions=case)
    lowlevel, place, done = llm.llm_engine, RowSequences.place, {}

    def full(self, row_seq, rows):
        if row_seq.request_id.startswith("fails"):
            raise weir.WeirError("the host buffer is full", "capture")
        return place(self, row_seq, rows)

    monkeypatch.setattr(row_sequences, "FIRST_GENERATED", 4)  # the rows need new room as they become more
    monkeypatch.setattr(RowSequences, "place", full)
    for name in ("stays", "fails"):
        lowlevel.add_request(name, prompt(70, 6), params)
        lowlevel.step()
    while lowlevel.has_unfinished_requests():
        done |= {out.request_id: out for out in lowlevel.step() if out.finished}
    with pytest.raises(weir.WeirError, match="buffer is full"):
        done["fails"].receipt  # noqa: B018 - a property that waits
    check(done["stays"], case, oracle)
    assert done["stays"].receipt.captured == {("resid_post", 2): 109}


def after(llm, oracle, params):
    """The engine answers, one request in and one out, and the next steered one is served."""
    (out,) = llm.generate(prompt(9, 3), sampling(3), use_tqdm=False)
    assert list(out.outputs[0].token_ids) == oracle.greedy(tokens(9, 3), 3)
    assert out.prompt_token_ids == tokens(9, 3)
    (out,) = llm.generate(prompt(9, 4), params, use_tqdm=False)
    assert out.receipt.steered == ({("resid_post", 1): 11},)
    assert idle(llm), usage(llm)


def test_a_receipt_counts_what_was_done(engine):
    llm, oracle = engine
    llm.reset_prefix_cache()
    items = [
        weir.Add(GOOD, [1, 2], positions="prompt"),
        weir.Add(GOOD, 1, positions=[0, 40, 200]),
        weir.Ablate(GOOD, 2, positions="generated"),
        weir.Add(GOOD, 1, 0.0),
        weir.Replace(torch.ones(3, D), 1, positions="38:41"),
    ]
    params = weir.params(sampling(5), capture=weir.Capture("resid_post", 1, "sampled"), interventions=items)
    for cached in (0, 64):
        (out,) = llm.generate(prompt(70), params, use_tqdm=False)
        check(out, items, oracle)
        assert out.receipt.cached_tokens == cached == out.num_cached_tokens
        a, b = ("resid_post", 1), ("resid_post", 2)
        gone = (cached, 2 if cached else 0, 0, 0, 3 if cached else 0)
        assert out.receipt.shared == gone
        assert out.receipt.steered == (
            {a: 70 - gone[0], b: 70 - gone[0]},
            {a: 2 - gone[1]},
            {b: 4},
            {},
            {a: 3 - gone[4]},
        )
        assert out.receipt.captured == {a: 5} and out.receipt.complete


def test_a_global_that_can_never_fit_is_refused(engine):
    llm, _oracle = engine
    try:
        with pytest.raises(weir.WeirError) as caught:
            weir.set_global(llm, [weir.Add(vectors(36)(ROWS + 1, D), 1, positions=range(ROWS + 1))])
        assert caught.value.field == "interventions"
        (out,) = llm.generate(prompt(9, 3), sampling(3), use_tqdm=False)
        assert out.receipt is None
    finally:
        weir.clear_global(llm)
