"""Controllers on a live engine: what async ones change for later requests, and what sync ones do in the next step."""

from __future__ import annotations

import functools
import threading

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import directory, frontend, prompts, sampling
from tests.engine.probe_cases import ENGINE, D, random_probe, reference, same_scores
from tests.support.engines import get_llm
from vllm_weir.controllers import AsyncController
from vllm_weir.errors import WeirError

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture
def llm(root):
    return get_llm(directory(root), **ENGINE)


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
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


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
    assert len(plain.outputs[0].token_ids) == 4 and not frontend(llm).always


@pytest.mark.parametrize("wrong", ["class", "name", "probe", "policy", "text"])
def test_wrong_controllers_are_refused(llm, add, wrong):
    add(Notes())
    far = random_probe("far", "linear", ("resid_post", 1), 8).public()
    controller, name, more = {
        "class": (Notes, "x", {}),
        "name": (Notes(), "c0", {}),
        "probe": (Notes(probes=[weir.Probe("far", far.weight, 0.0, "resid_post", 99)]), "x", {}),
        "policy": (Notes(), "x", {"policy": "wait"}),
        "text": (Notes(probes=["mood"]), "x", {}),
    }[wrong]
    with pytest.raises(WeirError):
        weir.add_controller(llm, name, controller, **more)
    assert list(weir.sinks(llm)).count("controller:x") == 0 and not weir.list_probes(llm)


def test_an_engine_sets_its_controllers_up_from_the_settings(root):
    """By ``module:class``, with options; wrong ones end the start."""
    settings = {"controllers": {"heat": {f"{__name__}:Declared": {"strength": 0.5}}}}
    llm = get_llm(directory(root), **ENGINE, additional_config={"weir": settings})
    first, second = (llm.generate(prompts([15]), sampling(4), use_tqdm=False)[0] for _ in range(2))
    assert list(first.scores) == ["declared"] and first.receipt.sinks == {"controller:heat": "written"}
    assert not first.receipt.steered and set(second.receipt.steered[0].values()) == {15 + 3}


class Declared(AsyncController):
    def __init__(self, strength: float) -> None:
        self.strength = strength
        self.probes = [random_probe("declared", "linear", ("resid_post", 1), 9).public()]

    def score(self, request, scores):
        self.actions.set_global(weir.Add(vector(10), 2, self.strength))
