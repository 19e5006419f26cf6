"""`stop_when`: generation ends with the token whose score says so, and nothing after it is delivered."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import assert_nothing_is_held, directory, prompts, sampling, scheduler, tokens
from tests.engine.probe_cases import asked, check_gated, random_probe, reference, same_scores
from tests.support.probe_reference import Act, GateCase
from tests.support.steered import chunks
from vllm_weir.errors import WeirError

pytestmark = pytest.mark.engine("default")
OPS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
MAX = 24


@pytest.fixture
def truth(root):
    return reference(directory(root))


@dataclass(frozen=True)
class Run:
    """What a request generates without a stop, and the scores of its tokens; a token without a score has None."""

    ids: list[int]
    made: list[int]
    scores: list[list[float] | None]

    def first(self, output, op, threshold):
        """Which generated token a rule holds for first; None if it holds for none that enters the model."""
        for k, score in enumerate(self.scores[: len(self.made) - 1]):
            if score is not None and OPS[op](score[output], threshold):
                return k
        return None

    def reached_at(self, k, output=0):
        """A threshold that the score of token `k` is above and no earlier one is; None if there is none."""
        earlier = [s[output] for s in self.scores[:k] if s is not None]
        now = self.scores[k]
        if now is None or (earlier and now[output] <= max(earlier) + 1e-3):
            return None
        return (now[output] + max(earlier)) / 2 if earlier else now[output] - 0.5


def scored(truth, ids, made, probe, others=(), acts=()):
    at, scores = truth.gated(ids + made, len(ids), [*others, probe], acts).scores[probe.name]
    known = dict(zip(at, scores.tolist(), strict=True))
    return Run(ids, made, [known.get(len(ids) + k) for k in range(len(made))])


def unstopped(llm, truth, ids, probe, others=(), acts=()):
    params = asked(sampling(MAX), [*others, probe], acts)
    made = list(llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs[0].token_ids)
    return scored(truth, ids, made, probe, others, acts)


def check_stopped(completion, run, k, probe, truth, others=(), acts=()):
    """The last token is the k-th of `run`; None: nothing stopped it."""
    made = list(completion.token_ids)
    if k is None:
        assert made == run.made and (completion.finish_reason, completion.stop_reason) == ("length", None)
    else:
        assert made == run.made[: k + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", f"probe:{probe.name}")
    ids = run.ids + made
    # The row of the token that ended generation was computed, or its score would not be known.
    rows = truth.gated(ids, len(run.ids), [*others, probe], acts).rows[probe.site][: len(ids) - (k is None)]
    same_scores(completion.scores, probe, *probe.scores(rows, len(run.ids), ids))


def last_of(run, output=0, first=2):
    """(token, threshold) of a token that a rule can end generation with, not the first ones."""
    found = [(k, run.reached_at(k, output)) for k in range(first, len(run.made) - 1)]
    found = [(k, threshold) for k, threshold in found if threshold is not None]
    assert found, "the scores never rise"
    return found[len(found) // 2]


def test_the_exact_last_token(llm, truth):
    """A batch in which every request has a rule of its own, beside plain ones; whole and in chunks."""
    probes = [
        random_probe("p", kind, ("resid_post", 1 + k % 3), 30 + k)
        for k, kind in enumerate(("linear", "mlp", "attention") * 4)
    ]
    runs = [unstopped(llm, truth, tokens(20 + k, k), probe) for k, probe in enumerate(probes)]
    params, expected = [], []
    for k, (run, probe) in enumerate(zip(runs, probes, strict=True)):
        rising = [(t, run.reached_at(t)) for t in range(MAX - 1) if run.reached_at(t) is not None]
        stop, threshold = rising[min(k // 3, len(rising) - 1)]
        expected.append(stop)
        params.append(asked(sampling(MAX), [probe], stop_when=f"p > {threshold!r}"))
        assert run.first(0, ">", threshold) == stop
    plain = sampling(MAX)
    texts = [{"prompt_token_ids": run.ids} for run in runs]
    for size in (None, 17):
        with chunks(llm, size):
            outs = llm.generate(texts * 2, [*params, *[plain] * len(texts)], use_tqdm=False)
        for out, run, stop, probe in zip(outs, runs, expected, probes, strict=False):
            check_stopped(out.outputs[0], run, stop, probe, truth)
        for out, run in zip(outs[len(texts) :], runs, strict=True):
            assert list(out.outputs[0].token_ids) == run.made
    assert len(set(expected)) >= 3
    del outs, out
    assert_nothing_is_held(llm)


def widest(scores, among):
    """A threshold between two of the sorted scores, as far from both as there is one."""
    k = max(among, key=lambda k: scores[k] - scores[k - 1])
    assert scores[k] - scores[k - 1] > 1e-4, "rounding decides"
    return (scores[k] + scores[k - 1]) / 2


def test_every_comparison_and_every_output(llm, truth):
    probe = random_probe("p", "linear", ("resid_post", 2), 50, 3, activation="softmax")
    run = unstopped(llm, truth, tokens(25, 50), probe)
    cases = []
    for output in range(3):
        threshold = widest(sorted(score[output] for score in run.scores[:-1]), range(8, 16))
        cases += [(output, op, threshold) for op in OPS] + [(output, ">", 2.0), (output, "<", -1.0)]
    params = [asked(sampling(MAX), [probe], stop_when=f"p[{o}] {op} {t!r}") for o, op, t in cases]
    outs = llm.generate([{"prompt_token_ids": run.ids}] * len(cases), params, use_tqdm=False)
    for out, case in zip(outs, cases, strict=True):
        check_stopped(out.outputs[0], run, run.first(*case), probe, truth)


def test_any_rule_that_holds_ends(llm, truth):
    """Rules on several probes; the reason is the one that held."""
    one, two = random_probe("one", "linear", ("resid_post", 1), 60), random_probe("two", "mlp", ("z", 2), 62)
    ids = tokens(22, 60)
    a, b = unstopped(llm, truth, ids, one), unstopped(llm, truth, ids, two)
    k, threshold = last_of(a)
    cases = [
        ([f"one > {threshold!r}", "two > 1e6"], k, "one"),
        (["two < -1e6", f"one > {threshold!r}"], k, "one"),
        (["one > 1e6", "two > -1e6"], 0, "two"),
        ([f"one > {threshold!r}", "two > -1e6"], 0, "two") if k else None,
        ("two >= 1e6", None, "two"),
    ]
    for rules, stop, name in filter(None, cases):
        params = asked(sampling(MAX), [one, two], stop_when=rules)
        (out,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        made = list(out.outputs[0].token_ids)
        assert made == (a.made if stop is None else a.made[: stop + 1]), rules
        assert out.outputs[0].stop_reason == (None if stop is None else f"probe:{name}")
    assert a.made == b.made


def test_a_prompt_does_not_stop(llm, truth):
    """Only the score of a generated token does; a token without a score has none."""
    probe = random_probe("p", "linear", ("resid_post", 1), 70)
    ids = tokens(30, 70)
    everywhere = asked(sampling(MAX), [probe], stop_when="p > -1e6")
    (out,) = llm.generate({"prompt_token_ids": ids}, everywhere, use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 1 and out.outputs[0].stop_reason == "probe:p"
    some = random_probe("p", "linear", ("resid_post", 1), 70, positions="34:")
    run = unstopped(llm, truth, ids, some)
    (out,) = llm.generate({"prompt_token_ids": ids}, asked(sampling(MAX), [some], stop_when="p > -1e6"), use_tqdm=False)
    check_stopped(out.outputs[0], run, 4, some, truth)


def test_beside_the_ends_that_vllm_knows(llm, truth):
    """Whichever comes first ends it: max_tokens, a stop token, the rule."""
    probe = random_probe("p", "linear", ("resid_post", 1), 80)
    run = unstopped(llm, truth, tokens(26, 80), probe)
    k, threshold = last_of(run, first=4)
    text, rule = {"prompt_token_ids": run.ids}, f"p > {threshold!r}"

    def ended(**more):
        params = asked(sampling(**{"max_tokens": MAX} | more), [probe], stop_when=rule)
        (out,) = llm.generate(text, params, use_tqdm=False)
        one = out.outputs[0]
        return list(one.token_ids), one.finish_reason, one.stop_reason

    assert ended() == (run.made[: k + 1], "stop", "probe:p")
    assert ended(max_tokens=k) == (run.made[:k], "length", None)
    # The last token's own row is never computed, so its score is not known.
    assert ended(max_tokens=k + 1) == (run.made[: k + 1], "length", None)
    assert ended(max_tokens=k + 2) == (run.made[: k + 1], "stop", "probe:p")
    early = run.made[1]
    first = run.made.index(early)
    assert ended(stop_token_ids=[early]) == (run.made[: first + 1], "stop", early)


def test_a_stop_under_a_gate(llm, truth):
    """The scores are those of the steered rows."""
    probe = random_probe("p", "linear", ("resid_post", 2), 90)
    early = random_probe("early", "linear", ("resid_post", 0), 91)
    acts = [Act(lambda **more: weir.Add(torch.ones(128), 1, 0.5, **more), GateCase("early", above=0.0))]
    run = unstopped(llm, truth, tokens(28, 90), probe, [early], acts)
    k, threshold = last_of(run)
    params = asked(sampling(MAX), [early, probe], acts, stop_when=f"p > {threshold!r}")
    (out,) = llm.generate({"prompt_token_ids": run.ids}, params, use_tqdm=False)
    check_stopped(out.outputs[0], run, k, probe, truth, [early], acts)
    traced = truth.gated(run.ids + run.made[: k + 1], 28, [early, probe], acts)
    same_scores(out.scores, early, *traced.scores["early"])


def test_samples_stop_each_for_itself(llm, truth):
    probe = random_probe("p", "linear", ("resid_post", 1), 100)
    ids = tokens(24, 100)
    options = {"temperature": 1.0, "seed": 11, "n": 4}
    (free,) = llm.generate({"prompt_token_ids": ids}, asked(sampling(MAX, **options), [probe]), use_tqdm=False)
    runs = [scored(truth, ids, list(one.token_ids), probe) for one in free.outputs]
    threshold = widest(sorted(s[0] for run in runs for s in run.scores[:-1]), range(-6, -2))
    params = asked(sampling(MAX, **options), [probe], stop_when=f"p > {threshold!r}")
    (out,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    stops = [run.first(0, ">", threshold) for run in runs]
    for one, run, stop in zip(out.outputs, runs, stops, strict=True):
        check_stopped(one, run, stop, probe, truth)
    assert any(stop is not None for stop in stops) and len(set(stops)) > 1


@pytest.mark.parametrize("kind", ["DELTA", "CUMULATIVE"])
def test_streams_hold_a_token_until_its_score_is_known(llm, truth, kind):
    """Each token comes once, with its score; the last output says why; the engine holds nothing a step later."""
    from vllm.sampling_params import RequestOutputKind

    probe = random_probe("p", "linear", ("resid_post", 1), 110)
    run = unstopped(llm, truth, tokens(27, 110), probe)
    k, threshold = last_of(run)
    engine = llm.llm_engine
    params = asked(sampling(MAX, output_kind=RequestOutputKind[kind]), [probe], stop_when=f"p > {threshold!r}")
    engine.add_request("streamed", {"prompt_token_ids": run.ids}, params)
    outs, steps = [], 0
    while engine.has_unfinished_requests():
        outs += engine.step()
        steps += 1
    assert steps <= k + 3, f"{steps} steps for {k + 1} tokens"
    assert not scheduler(llm).requests
    assert [out.finished for out in outs] == [False] * (len(outs) - 1) + [True]
    last = outs[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", "probe:p")
    if kind == "DELTA":
        made = [t for out in outs for t in out.outputs[0].token_ids]
        scores = torch.cat([out.outputs[0].scores["p"] for out in outs])
        at = [p for out in outs for p in out.outputs[0].scores.positions["p"].tolist()]
        # What comes with a token is no later than the token's own score.
        told = 0
        for out in outs:
            told += len(out.outputs[0].token_ids)
            assert not len(out.outputs[0].scores["p"]) or out.outputs[0].scores.positions["p"].max() < 27 + told
    else:
        made, scores = list(last.token_ids), last.scores["p"]
        at = last.scores.positions["p"].tolist()
        grown = [list(out.outputs[0].token_ids) for out in outs]
        assert all(made[: len(part)] == part for part in grown)
    assert made == run.made[: k + 1] and len(outs) >= k
    assert at == list(range(27 + k + 1)) and len(scores) == len(at)


def test_as_many_steps_as_a_stop_string_plus_the_step_that_scores(llm, truth):
    """The token's own row has to be computed; nothing more is."""
    probe = random_probe("p", "linear", ("resid_post", 1), 120)
    run = unstopped(llm, truth, tokens(21, 120), probe)
    k, threshold = last_of(run, first=5)
    text = llm.get_tokenizer().decode([run.made[k]])
    assert run.made.index(run.made[k]) == k, "the stop string would end it earlier"

    def steps(params):
        engine, n = llm.llm_engine, 0
        engine.add_request(f"counted {n}", {"prompt_token_ids": run.ids}, params)
        outs = []
        while engine.has_unfinished_requests():
            outs += engine.step()
            n += 1
        return n, list(outs[-1].outputs[0].token_ids)

    by_string, made = steps(sampling(MAX, stop=[text]))
    by_score, same = steps(asked(sampling(MAX), [probe], stop_when=f"p > {threshold!r}"))
    assert made == same == run.made[: k + 1]
    assert by_score <= by_string + 1


@pytest.mark.parametrize("rule", ["p == 1", "q > 0.5", "p[2] > 0.5", "p > 1"])
def test_refusals(llm, rule):
    """What no rule is; another probe, another output than there are; and a rule without its probe."""
    probes = [] if rule == "p > 1" else [random_probe("p", "linear", ("resid_post", 1), 130, 2)]
    with pytest.raises(WeirError) as error:
        llm.generate(prompts([9]), asked(sampling(3), probes, stop_when=rule), use_tqdm=False)
    assert error.value.field.startswith("stop_when")
    assert not llm.llm_engine.has_unfinished_requests()


def test_gates_and_rules_of_one_probe(llm, truth):
    """One probe opens a gate and ends generation."""
    probe = random_probe("p", "linear", ("resid_post", 1), 140)
    acts = [Act(lambda **more: weir.Add(torch.ones(128), 3, 0.5, **more), GateCase("p", above=0.0))]
    params = asked(sampling(8), [probe], acts, capture=weir.Capture("resid_post"), stop_when="p > 1e6")
    (out,) = llm.generate({"prompt_token_ids": tokens(19, 140)}, params, use_tqdm=False)
    assert check_gated(out, [probe], acts, truth) is not None and out.outputs[0].finish_reason == "length"
