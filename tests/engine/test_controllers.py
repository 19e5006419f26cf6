"""Controllers on a live engine: what async ones change for later requests, and what sync ones do in the next step."""

from __future__ import annotations

import functools
import threading

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import assert_nothing_is_held, directory, frontend, prompts, sampling, tokens
from tests.engine.probe_cases import (
    BOUND,
    D,
    asked,
    check_gated,
    check_greedy,
    preemptions,
    random_probe,
    reference,
    same_scores,
    small_engine,
)
from tests.engine.sync_controllers import SETTINGS, Both, LeakyCase, Odd
from tests.support.engines import get_llm
from tests.support.machine import BATCHES, cpu, needs
from tests.support.measure import alike, logit_bound, rel_err
from tests.support.named import ENGINES
from tests.support.probe_reference import Act
from tests.support.steered import chunks
from vllm_weir.controllers import AsyncController
from vllm_weir.errors import WeirError

pytestmark = pytest.mark.engine
MARGIN = 1e-4


def engine(root, controllers=SETTINGS):
    settings = {"weir": {"controllers": controllers}}
    return get_llm(directory(root), **ENGINES["default"].arguments, additional_config=settings)


@pytest.fixture
def llm(root):
    return engine(root)


@pytest.fixture
def truth(root):
    return reference(directory(root))


def vector(seed, scale=1.0):
    return scale * torch.randn(D, generator=torch.Generator().manual_seed(seed))


class Notes(AsyncController):
    """Notes all that it gets, and does what a test says."""

    def __init__(self, act=lambda actions, scores: None, probes=(), captures=(), required=False):
        self.act, self.probes, self.captures, self.required = act, probes, captures, required
        self.scores, self.rows, self.finished, self.threads = [], [], [], set()

    def score(self, request, scores):
        self.threads.add(threading.current_thread())
        self.scores.append((request, scores))
        self.act(self.actions, scores)

    def take(self, rows):
        self.rows.append((rows.site, rows.positions.clone(), rows.data.clone()))

    def finish(self, request):
        self.finished.append(request.request_id)
        return []


@pytest.fixture
def add(llm):
    """Add a controller for one test."""
    names = []

    def adding(controller, **more):
        names.append(f"c{len(names)}")
        weir.add_controller(llm, names[-1], controller, **more)
        return controller

    yield adding
    weir.clear_global(llm)
    for name in names:
        weir.remove_controller(llm, name)
    assert not [name for name in weir.sinks(llm) if name.startswith("controller:")]
    assert not weir.list_probes(llm)


def asked_of(probe, **more):
    return weir.params(sampling(4, logprobs=2), probes=probe.public(), **more)


def generate(llm, texts, params):
    llm.reset_prefix_cache()
    return llm.generate(texts, params, use_tqdm=False)


def test_scores_and_rows_reach_the_controller_before_the_outputs_return(llm, truth, add):
    """Each sequence once, with its own scores, in one thread that is not the caller's; `n` gives several."""
    probe = random_probe("own", "linear", ("resid_post", 2), 1, 2)
    notes = add(Notes(captures=[weir.Capture("resid_post", 1, "generated")]))
    texts = prompts([20, 33, 7])
    outs = generate(
        llm, texts, [asked_of(probe), weir.params(sampling(4, n=2, temperature=1), probes=probe.public()), sampling(4)]
    )
    assert len(notes.threads) == 1 and notes.threads != {threading.current_thread()}
    found = {(request.request_id, request.index): scores for request, scores in notes.scores}
    assert sorted(found) == sorted((out.request_id, one.index) for out in outs for one in out.outputs)
    for out in outs[:2]:
        for one in out.outputs:
            ids = list(out.prompt_token_ids) + list(one.token_ids)
            rows = truth.rows(ids[:-1])
            same_scores(
                found[out.request_id, one.index],
                probe,
                *probe.scores(rows[probe.site], len(out.prompt_token_ids), ids[:-1]),
            )
    assert not found[outs[2].request_id, 0], "no probe scored it"
    assert len(notes.rows) == 4 and all(site == ("resid_post", 1) and len(at) == 3 for site, at, _ in notes.rows)
    assert notes.finished == [request.request_id for request, _ in notes.scores]


def test_a_named_vector_and_a_global_change_later_requests_only(llm, add):
    """What is steered afterwards equals the same asked for by hand, bit for bit; KV of before is not reused."""
    probe = random_probe("mood", "linear", ("resid_post", 1), 2)
    texts, v, w = prompts([40, 40, 24]), vector(3, 4.0), vector(4, 3.0)
    named = weir.params(sampling(4, logprobs=2), interventions=weir.Add("dial", 2))
    weir.register(llm, "dial", v)
    before, by_hand = generate(llm, texts, named), {}
    weir.register(llm, "dial", w)
    by_hand["dial"] = generate(llm, texts, named)
    weir.set_global(llm, weir.Add(v, 3))
    by_hand["all"] = generate(llm, texts, sampling(4, logprobs=2))
    weir.clear_global(llm)
    plain = generate(llm, texts, sampling(4, logprobs=2))
    weir.register(llm, "dial", v)

    steps = [lambda actions: actions.set_vector("dial", w), lambda actions: actions.set_global(weir.Add(v, 3)),
             lambda actions: actions.clear_global()]  # fmt: skip
    todo = []
    add(Notes(lambda actions, scores: todo.pop(0)(actions) if todo else None))
    llm.reset_prefix_cache()
    run = functools.partial(llm.generate, texts, use_tqdm=False)  # from here on with the prefix cache as it is
    same(run(named), before)
    todo.append(steps[0])
    llm.generate(texts[2], asked_of(probe), use_tqdm=False)
    same(run(named), by_hand["dial"])
    todo.append(steps[1])
    llm.generate(texts[2], asked_of(probe), use_tqdm=False)
    same(run(sampling(4, logprobs=2)), by_hand["all"])
    todo.append(steps[2])
    llm.generate(texts[2], asked_of(probe), use_tqdm=False)
    same(run(sampling(4, logprobs=2)), plain)
    assert before[0].outputs[0].logprobs != by_hand["dial"][0].outputs[0].logprobs
    weir.unregister(llm, "dial")


def same(outs, others):
    for one, other in zip(outs, others, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert alike(one.outputs[0].logprobs, other.outputs[0].logprobs)


def test_its_own_probes_score_every_request(llm, truth, add):
    """Thermostat: the mean score of the last answer decides how strongly the next one is steered."""
    probe = random_probe("heat", "linear", ("resid_post", 0), 5, positions="generated")
    v = vector(6, 2.0)

    def act(actions, scores):
        actions.set_global(weir.Add(v, 2, float(scores["heat"].mean())))

    notes = add(Notes(act, probes=[probe.public()]))
    (first,) = generate(llm, prompts([18]), sampling(4))
    (second,) = generate(llm, prompts([18]), sampling(4, logprobs=2))
    strength = float(first.scores["heat"].mean())
    assert float(notes.scores[0][1]["heat"].mean()) == strength
    weir.clear_global(llm)
    (by_hand,) = generate(
        llm, prompts([18]), weir.params(sampling(4, logprobs=2), interventions=weir.Add(v, 2, strength))
    )
    same([second], [by_hand])


def test_what_a_controller_raises(llm, add, caplog):
    """It is logged and counted, in the receipt, and fails the request if the controller is required."""

    def act(actions, scores):
        actions.set_global(weir.Add([1.0, 2.0], 2))  # of another width

    probe = random_probe("p", "linear", ("resid_post", 1), 7)
    add(Notes(act))
    (out,) = generate(llm, prompts([12]), asked_of(probe))
    assert out.receipt.sinks["controller:c0"].startswith("failed: WeirError")
    state = weir.sinks(llm)["controller:c0"]
    assert state["failed"] == 1 and "width" in state["last_error"]
    add(Notes(act, required=True))
    with pytest.raises(WeirError, match="controller:c1"):
        generate(llm, prompts([12]), asked_of(probe))
    (plain,) = generate(llm, prompts([12]), sampling(4))
    assert len(plain.outputs[0].token_ids) == 4 and not frontend(llm).names.always


def test_wrong_controllers_are_refused(llm, add):
    add(Notes())
    far = Notes(probes=[weir.Probe("far", vector(8), layer=99)])
    for name, controller, more in (("c0", Notes(), {}), ("x", far, {}), ("x", Notes(), {"policy": "wait"})):
        with pytest.raises(WeirError):
            weir.add_controller(llm, name, controller, **more)
        assert "controller:x" not in weir.sinks(llm) and not weir.list_probes(llm)


def leaky(k, length, **more):
    """A request that `Leaky` decides on: its prompt, its probe and its interventions."""
    probe = random_probe(
        "p", ("linear", "mlp", "attention")[k % 3], (("resid_post", 1), ("resid_post", 3))[k % 2], 20 + k, **more
    )
    gate = LeakyCase("p", length)
    makes = [functools.partial(weir.Add, vector(k, 3.0), 2, positions="generated"),
             functools.partial(weir.Clamp, vector(k + 9), [0, 3], value=4.0, positions="generated"),
             functools.partial(weir.Ablate, vector(k + 19), [1], hook="mlp_out", positions="generated")]  # fmt: skip
    return tokens(length, 30 + k), [probe], [Act(makes[k % 3], gate), Act(makes[0])]


def run(llm, requests, max_tokens=10, positions="all", **more):
    capture = weir.Capture(positions=positions)
    params = [asked(sampling(max_tokens, **more), probes, acts, capture=capture) for _, probes, acts in requests]
    return llm.generate([{"prompt_token_ids": ids} for ids, _, _ in requests], params, use_tqdm=False)


@pytest.mark.parametrize("size", [None, 23])
def test_a_sync_controller_equals_the_reference(llm, truth, size):
    """Token for token, at probes before and after what is steered, whole and in chunks; receipts say where it acted."""
    llm.reset_prefix_cache()
    positions = ["all", "all", "generated", "last_prompt", "sampled", "all", "prompt", "all", "all"]
    requests = [leaky(k, 12 + 7 * k, positions=at) for k, at in enumerate(positions)]
    strengths = []
    with chunks(llm, size):
        outs = run(llm, requests)
    for out, (ids, probes, acts) in zip(outs, requests, strict=True):
        traced = check_gated(out, probes, acts, truth)
        generated = traced.factors[0][len(ids) :]
        strengths += generated
        gate = out.receipt.gates[0]
        assert (gate["probe"], gate["of"]) == ("controller:leaky", 9)
        assert (
            gate["fired"] == sum(one != 0 for one in generated) >= (1 if probes[0].positions == "generated" else 9) - 1
        )
        assert out.receipt.gates[1] is None
    assert min(strengths) < -0.3 and max(strengths) > 0.3, "strengths near zero show little"
    del outs, out
    assert_nothing_is_held(llm)


@needs(cpu(BATCHES))
def test_answers_do_not_depend_on_who_else_runs(llm, truth):
    """Alone, beside others, with `n`, and from the prefix cache."""
    request = leaky(0, 40)
    (alone,) = run(llm, [request], logprobs=2)
    beside = run(llm, [leaky(k, 40) for k in range(1, 6)] + [request], logprobs=2)[-1]
    one, other = beside.outputs[0], alone.outputs[0]
    assert one.token_ids == other.token_ids
    for token, here, there in zip(one.token_ids, one.logprobs, other.logprobs, strict=True):
        assert abs(here[token].logprob - there[token].logprob) <= logit_bound(20.0)  # in batches of other sizes
    (twice,) = run(llm, [request], n=2, temperature=1.0, seed=5)
    ids = request[0]
    for completion in twice.outputs:
        traced = truth.gated([*ids, *completion.token_ids][:-1], len(ids), *request[1:])
        assert rel_err(completion.activations["resid_post", 3], traced.rows["resid_post", 3]) <= BOUND
    assert twice.outputs[0].token_ids != twice.outputs[1].token_ids
    assert twice.num_cached_tokens == 0, "a probe of the prompt keeps it from the cache"
    request = leaky(1, 70, positions="generated")
    (cold,), (warm,) = (run(llm, [request], positions="generated") for _ in range(2))
    assert warm.num_cached_tokens >= 64 > cold.num_cached_tokens
    check_gated(warm, *request[1:], truth)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


def test_neighbours_of_controlled_requests_get_the_same_bits(llm):
    texts = prompts([30 + 3 * k for k in range(12)])
    _, probes, acts = leaky(0, 30)
    plain = sampling(6, logprobs=3)
    found = []
    for controlled in (plain, asked(plain, probes, acts[:1])):
        found.append(generate(llm, texts, [controlled if k % 3 == 0 else plain for k in range(12)]))
    same(*([out for k, out in enumerate(outs) if k % 3] for outs in found))
    assert any(found[0][k].outputs[0].logprobs != found[1][k].outputs[0].logprobs for k in range(0, 12, 3))


def test_what_a_step_holds(llm, truth):
    """Each request once for its prompt and once for each token, with both probes' scores of its last token."""
    Both.calls.clear()
    probes = [random_probe("p", "linear", ("resid_post", 1), 60), random_probe("q", "linear", ("z", 3), 61, 3)]
    params = weir.params(
        sampling(5),
        probes=[probe.public() for probe in probes],
        interventions=weir.Add(vector(62), 1, positions="generated", when=weir.When("controller:both")),
    )
    with chunks(llm, 16):
        outs = llm.generate(prompts([50, 20]), params, use_tqdm=False)
    for out in outs:
        rows = [(step, step.request_ids.index(one)) for step in Both.calls for one in step.request_ids
                if one.split("-")[0] == out.request_id.split("-")[0]]  # fmt: skip
        assert len(rows) == 5 - 1 + (len(rows) == 5), "the last token has no next one"
        assert [bool(step.first[k]) for step, k in rows] == [True] + [False] * (len(rows) - 1)
        assert len({int(step.slots[k]) for step, k in rows}) == 1
        length = len(out.prompt_token_ids)
        for t, (step, k) in enumerate(rows):
            for name, width in (("p", 1), ("q", 3)):
                assert step.scores[name].shape == (len(step), width)
                if t < 4:
                    assert torch.equal(step.scores[name][k].cpu(), out.scores[name][length - 1 + t])
    del outs, out


def odd():
    probe = random_probe("p", "linear", ("resid_post", 1), 71)
    add = weir.Add(vector(70), 2, positions="generated", when=weir.When("controller:odd"))
    return weir.params(sampling(5, logprobs=2), probes=probe.public(), interventions=add)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (ZeroDivisionError, "ZeroDivisionError: on purpose"),
        (torch.ones(99), "step returned"),
        (None, "not a tensor"),
        (float("nan"), "no number from -1 to 1 for position"),
        (1.5, "no number from -1 to 1 for position"),
    ],
)
def test_a_sync_controller_that_fails(llm, monkeypatch, answer, why):
    """The requests that it decides on fail and say why; their neighbours and the engine go on, and so does it."""
    texts, plain = prompts([20, 21, 22]), sampling(5, logprobs=2)

    def told():
        """Tokens and logprobs of the outputs, and why a request has failed; no output is kept."""
        outs, failure = [], ""
        try:
            outs = generate(llm, texts, [odd(), plain, odd()])
        except WeirError as error:
            outs, failure = error.outputs, str(error)
        return [(list(out.outputs[0].token_ids), out.outputs[0].logprobs) for out in outs], failure

    before, _ = told()
    monkeypatch.setattr(Odd, "answer", answer)
    found, failure = told()
    assert why in failure and found[1][0] == before[1][0] and alike(found[1][1], before[1][1])
    monkeypatch.undo()
    again, failure = told()
    assert not failure and [ids for ids, _ in again] == [ids for ids, _ in before]
    assert all(alike(one, other) for (_, one), (_, other) in zip(again, before, strict=True))
    assert_nothing_is_held(llm)


def test_a_strength_of_one_is_the_intervention_itself(llm):
    probe = random_probe("p", "linear", ("resid_post", 1), 71)
    plain = weir.params(
        sampling(5, logprobs=2), probes=probe.public(), interventions=weir.Add(vector(70), 2, positions="generated")
    )
    same(generate(llm, prompts([20]), odd()), generate(llm, prompts([20]), plain))


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"positions": "all"}, "interventions[0].positions"),
        ({"positions": "sampled"}, "interventions[0].positions"),
        ({"when": "controller:none"}, "interventions[0].when.probe"),
    ],
)
def test_what_cannot_be_exact_is_refused(llm, more, field):
    when = weir.When(more.pop("when", "controller:leaky"))
    probe = random_probe("p", "linear", ("resid_post", 1), 72)
    add = weir.Add(vector(73), 2, **{"positions": "generated"} | more, when=when)
    with pytest.raises(WeirError) as error:
        llm.generate(prompts([8]), weir.params(sampling(2), probes=probe.public(), interventions=add), use_tqdm=False)
    assert error.value.field == field


def test_a_global_under_a_controller(llm, truth):
    """Its probe has to be registered; then every request is steered by it."""
    ids, (probe,), acts = leaky(3, 25)
    with pytest.raises(WeirError, match="'p'"):
        weir.set_global(llm, acts[0].public())
    weir.register_probe(llm, probe.public())
    weir.set_global(llm, acts[0].public())
    (out,) = llm.generate({"prompt_token_ids": ids}, asked(sampling(8), [], [], capture=weir.Capture()), use_tqdm=False)
    weir.clear_global(llm)
    weir.unregister_probe(llm, "p")
    traced = truth.gated([*ids, *out.outputs[0].token_ids][:-1], len(ids), [probe], acts[:1])
    check_greedy(out.outputs[0].token_ids, traced.logits[len(ids) - 1 :])
    assert out.receipt.gates[0]["probe"] == "controller:leaky"


@pytest.mark.thorough
def test_preempted_requests_fail_or_are_exact(root, truth):
    """A request whose generated tokens are computed again together says that it was preempted."""
    llm = small_engine(root, additional_config={"weir": {"controllers": SETTINGS}})
    requests = [leaky(k, length) for k, length in enumerate([30, 31, 40, 33, 32, 35])]
    with preemptions(llm) as found:
        try:
            outs, failed = run(llm, requests, max_tokens=90), ""
        except WeirError as error:
            outs, failed = error.outputs, str(error)
    assert found and "preempted" in failed and "send it again" in failed
    right = 0
    for out, (_, probes, acts) in zip(outs, requests, strict=True):
        try:
            out.receipt  # noqa: B018 - raises if the request has failed
        except WeirError:
            continue
        right += check_gated(out, probes, acts, truth, margin=MARGIN) is not None
    assert right >= 1


def test_an_engine_sets_its_controllers_up_from_the_settings(root):
    """By ``module:class``, with options."""
    llm = engine(root, {"heat": {f"{__name__}:Declared": {"strength": 0.5}}})
    first, second = (llm.generate(prompts([15]), sampling(4), use_tqdm=False)[0] for _ in range(2))
    assert list(first.scores) == ["declared"] and first.receipt.sinks == {"controller:heat": "written"}
    assert not first.receipt.steered and set(second.receipt.steered[0].values()) == {15 + 3}


class Declared(AsyncController):
    def __init__(self, strength: float) -> None:
        self.strength = strength
        self.probes = [random_probe("declared", "linear", ("resid_post", 1), 9).public()]

    def score(self, request, scores):
        self.actions.set_global(weir.Add(vector(10), 2, self.strength))
