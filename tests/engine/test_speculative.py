"""Speculative decoding: rows, steering and scores are as without it, and rejected drafts leave no trace."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import (
    BOUND,
    SELECTORS,
    asking,
    assert_nothing_is_held,
    directory,
    ids_of,
    prompts,
    same_rows,
    sampling,
    tokens,
    verify,
)
from tests.engine.probe_cases import (
    D,
    asked,
    check_gated,
    check_scores,
    every_kind,
    preemptions,
    random_probe,
)
from tests.support.draft_models import drafting
from tests.support.drafter import KnownDrafter
from tests.support.engines import get_llm
from tests.support.measure import close_logits, close_products, rel_err
from tests.support.named import ENGINES
from tests.support.probe_reference import Act, GateCase
from tests.support.references import reference
from tests.support.steered import check
from vllm_weir.errors import WeirError
from vllm_weir.worker.planning.drafts import DraftLedger

pytestmark = pytest.mark.engine("drafts")
ENGINE = ENGINES["drafts"].arguments
MADE = 24


def repetitive(length: int, seed: int) -> list[int]:
    """A prompt in which n-grams come again, so that drafts are made from the first token on."""
    return (tokens(7, seed) * 40)[:length]


def batch(lengths: Any = (64, 33, 17, 1, 2, 100, 64, 50, 8, 3)) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": repetitive(n, seed)} for seed, n in enumerate(lengths)]


def generate(llm, prompts, params, teach=True):
    """Outputs, once the drafter knows what it should draft."""
    if teach:
        for out in llm.generate(prompts, params, use_tqdm=False):
            KnownDrafter.teach([ids_of(out, one) for one in out.outputs])
    return llm.generate(prompts, params, use_tqdm=False)


@contextlib.contextmanager
def drafts(monkeypatch, at_least=20):
    """How many drafts of requests with Weir's keys were accepted, and how many were rejected."""
    found = {"accepted": 0, "rejected": 0}
    verify_step = DraftLedger.verify

    def counting(self, step, sampled):
        verified = verify_step(self, step, sampled)
        held = verified.ends - verified.first_tokens
        found["accepted"] += int((held - (step.counts - step.drafts)).sum())
        found["rejected"] += int((step.counts - held).sum())
        return verified

    with monkeypatch.context() as patched:
        patched.setattr(DraftLedger, "verify", counting)
        yield found
    assert min(found.values()) > at_least, found


def test_rows_equal_transformers(llm, truth, monkeypatch):
    requests = [asking(selector, truth.num_layers, MADE) for selector in SELECTORS]
    with drafts(monkeypatch):
        outs = generate(llm, batch(), [params for params, _ in requests])
    for out, (_, wanted) in zip(outs, requests, strict=True):
        verify(out, wanted, truth)
        assert len(out.outputs[0].token_ids) == MADE
    everything = weir.params(sampling(MADE), capture=weir.Capture("resid_post", [1]))
    for out in llm.generate(batch(), everything, use_tqdm=False):
        assert len(out.activations["resid_post", 1]) == len(out.prompt_token_ids) + MADE - 1


def test_every_length_ends_with_its_own_rows(llm, truth):
    """Drafts accepted beyond `max_tokens` and beyond a stop token have no rows."""
    ids = repetitive(30, 3)
    requests = [asking("all", truth.num_layers, length) for length in range(1, 14)]
    outs = generate(llm, [{"prompt_token_ids": ids}] * len(requests), [p for p, _ in requests])
    for length, (out, (_, wanted)) in enumerate(zip(outs, requests, strict=True), 1):
        verify(out, wanted, truth)
        assert len(out.outputs[0].token_ids) == length
    made = list(outs[-1].outputs[0].token_ids)
    for stop in sorted(set(made)):
        params, wanted = asking("all", truth.num_layers, 13, stop_token_ids=[stop])
        (out,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        verify(out, wanted, truth)
        assert list(out.outputs[0].token_ids) == made[: made.index(stop) + 1]


@pytest.mark.parametrize("kind", ["DELTA", "CUMULATIVE"])
def test_a_stream_never_shows_the_row_of_a_rejected_draft(llm, truth, kind, monkeypatch):
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    generate(llm, batch((30, 41, 9)), sampling(60))
    for n, prompt in enumerate(batch((30, 41, 9))):
        params, _ = asking("all", truth.num_layers, 60, output_kind=RequestOutputKind[kind])
        engine.add_request(f"r{n}", prompt, params)
    parts: dict[str, list[tuple[list[int], torch.Tensor, list[int]]]] = {}
    with drafts(monkeypatch):
        while engine.has_unfinished_requests():
            for out in engine.step():
                one = out.outputs[0]
                rows = one.activations["resid_post", 1].clone()
                at = one.activations.positions_of("resid_post", 1).tolist()
                ids = list(out.prompt_token_ids)
                parts.setdefault(out.request_id, []).append((ids + list(one.token_ids), rows, at))
    for n, prompt in enumerate(batch((30, 41, 9))):
        got, ids = parts[f"r{n}"], prompt["prompt_token_ids"]
        whole = got[-1][0]
        if kind == "DELTA":
            whole = ids + [t for part, _, _ in got for t in part[len(ids) :]]
            assert [p for _, _, at in got for p in at] == list(range(len(whole) - 1))
        expected = truth.rows(whole[:-1], [("resid_post", 1)])["resid_post", 1]
        for _, rows, at in got:
            assert (rows.double() - expected[at].double()).abs().max() <= BOUND * expected.abs().max()
        assert len(got) < 60, "no draft was accepted"


def interventions(seed: int, layers: Any, positions: Any) -> list[Any]:
    v = torch.randn(3, D, generator=torch.Generator().manual_seed(seed))
    return [
        weir.Add(v[0], layers, 2.0, positions=positions),
        weir.Ablate(v[1], layers, positions=positions),
        weir.Add(v[2], [3], 1.0, positions="generated"),
    ]


def test_steering_acts_on_verified_tokens_by_position(llm, truth, monkeypatch):
    """Also where it begins, ends or changes among the drafts of one step."""
    selectors = [
        "all",
        "prompt",
        "generated",
        "sampled",
        "30:41",
        "34:60:3",
        [31, 33, 36, -1],
        {"token_ids": list(range(0, 510, 2))},
    ]
    lists = [interventions(k, [1, 2], selector) for k, selector in enumerate(selectors)]
    each = weir.Add(
        torch.randn(5, D, generator=torch.Generator().manual_seed(9)), [1], 2.0, positions=[30, 32, 33, 35, 37]
    )
    lists.append([each])
    params = [weir.params(sampling(MADE), interventions=one, capture=weir.Capture("resid_post")) for one in lists]
    prompt = {"prompt_token_ids": repetitive(30, 5)}
    with drafts(monkeypatch):
        outs = generate(llm, [prompt] * len(lists), params)
    for out, steered in zip(outs, lists, strict=True):
        check(out, steered, truth)
    again = llm.generate([prompt] * len(lists), params, use_tqdm=False)
    for out, twin in zip(outs, again, strict=True):  # now the prefix cache has the blocks of the generated tokens, too
        assert out.outputs[0].token_ids == twin.outputs[0].token_ids
        same_rows(out.activations, twin.activations)


def test_scores_are_those_of_accepted_tokens(llm, truth, monkeypatch):
    """Every kind of probe and smoothing: what a rejected draft has added is taken back."""
    probes = every_kind()
    groups = [probes[k::12] for k in range(12)]
    params = [asked(sampling(MADE), group) for group in groups]
    with drafts(monkeypatch):
        outs = generate(llm, [{"prompt_token_ids": repetitive(30, k)} for k in range(12)], params)
    for out, group in zip(outs, groups, strict=True):
        check_scores(out, group, truth)


def test_gates_follow_accepted_tokens(llm, truth, monkeypatch):
    v = torch.randn(D, generator=torch.Generator().manual_seed(2))
    requests = []
    for k, more in enumerate(({}, {"latch": True}, {"delay": 1}, {"sharpness": 2.0}, {"delay": 1, "latch": True}) * 2):
        smooth = (None, ("ema", 0.3), ("max",), ("mean", 5))[k % 4]
        probe = random_probe("p", "linear", ("resid_post", 1), 40 + k, smooth=smooth)
        ids = repetitive(30, 20 + k)
        scores = truth.gated(ids, 30, [probe], []).scores["p"][1][:, 0]
        gate = GateCase("p", above=float(scores.median()) + 1e-3, **more)
        requests.append((ids, [probe], [Act(lambda **kw: weir.Add(v, [2], 1.5, positions="generated", **kw), gate)]))
    params = [asked(sampling(MADE), probes, acts, capture=weir.Capture("resid_post")) for _, probes, acts in requests]
    with drafts(monkeypatch):
        outs = generate(llm, [{"prompt_token_ids": ids} for ids, _, _ in requests], params)
    checked = [
        check_gated(out, probes, acts, truth, margin=1e-4)
        for out, (_, probes, acts) in zip(outs, requests, strict=True)
    ]
    assert sum(one is not None for one in checked) >= 7


def test_a_probe_stops_at_the_token_whose_score_says_so(llm):
    probe, ids = random_probe("p", "linear", ("resid_post", 1), 110), repetitive(27, 4)
    params = asked(sampling(MADE), [probe], capture=weir.Capture(*probe.site))
    (whole,) = generate(llm, [{"prompt_token_ids": ids}], params)
    room = BOUND * float(whole.activations[probe.site].norm(dim=1).max() * probe.tensors["weight"].norm())
    scores, made = whole.outputs[0].scores["p"][27:, 0].tolist(), list(whole.outputs[0].token_ids)
    tried = 0
    for k in range(1, len(scores)):
        if scores[k] > max(scores[:k]) + 1e-3:
            threshold = (scores[k] + max(scores[:k])) / 2
            params = asked(sampling(MADE), [probe], stop_when=f"p > {threshold!r}")
            (out,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
            assert list(out.outputs[0].token_ids) == made[: k + 1]
            assert out.outputs[0].stop_reason == "probe:p"
            assert out.outputs[0].scores.positions["p"].tolist() == list(range(27 + k + 1))
            assert torch.allclose(out.outputs[0].scores["p"], whole.outputs[0].scores["p"][: 27 + k + 1], atol=room)
            tried += 1
    assert tried


def test_what_needs_the_token_before_is_refused(llm):
    v = torch.ones(D)
    probe = weir.Probe("p", torch.ones(1, D), torch.zeros(1), "resid_post", 2)
    early = weir.Add(v, [1], 1.0, positions="generated", when=weir.When("p", above=0.0, delay=1))
    with pytest.raises(WeirError, match="several tokens in one pass") as refused:
        llm.generate(prompts([5]), weir.params(sampling(2), probes=[probe], interventions=[early]), use_tqdm=False)
    assert refused.value.field == "interventions[0].when"


def test_compression_projection_and_reduction(llm, truth):
    directions = torch.randn(2, D, generator=torch.Generator().manual_seed(1))
    prompt = {"prompt_token_ids": repetitive(30, 6)}
    forms: list[dict[str, Any]] = [
        {"compress": "full8"},
        {"project": directions},
        {"reduce": "mean"},
        {"reduce": "max"},
        {"reduce": "last"},
    ]
    params = [weir.params(sampling(MADE), capture=weir.Capture("resid_post", [1], **form)) for form in forms]
    outs = generate(llm, [prompt] * len(forms), params)
    ids = prompt["prompt_token_ids"] + list(outs[0].outputs[0].token_ids)
    rows = truth.rows(ids[:-1], [("resid_post", 1)])["resid_post", 1].float()
    got = [out.activations["resid_post", 1] for out in outs]
    step = float((rows.amax(1) - rows.amin(1)).max()) / 255
    assert float((got[0] - rows).abs().max()) <= 0.51 * step + 1e-4 * float(rows.abs().max())
    bound = BOUND * float(rows.abs().max())
    assert close_products(got[1], rows, directions)
    for reduced, expected in zip(got[2:], (rows.mean(0), rows.amax(0), rows[-1]), strict=True):
        assert torch.allclose(reduced.flatten(), expected, rtol=0, atol=bound)


def test_neighbours_get_the_same_tokens(llm):
    plain = batch((40, 23, 64, 9))
    alone = generate(llm, plain, sampling(MADE, logprobs=1))
    steered = weir.params(
        sampling(MADE), interventions=interventions(3, [1, 2], "all"), capture=weir.Capture("resid_post")
    )
    mixed = [one for prompt in plain for one in (prompt, {"prompt_token_ids": repetitive(21, 77)})]
    outs = llm.generate(mixed, [sampling(MADE, logprobs=1), steered] * 4, use_tqdm=False)[::2]
    for out, twin in zip(outs, alone, strict=True):
        assert out.outputs[0].token_ids == twin.outputs[0].token_ids
    assert_nothing_is_held(llm)


def test_rows_and_scores_survive_preemption(root, monkeypatch):
    llm = get_llm(directory(root), **ENGINE | ENGINES["scarce"].arguments)
    truth, probe = reference(directory(root)), random_probe("p", "linear", ("resid_post", 1), 7, smooth=("ema", 0.3))
    params = [
        asked(sampling(90), [probe], capture=weir.Capture("resid_post", positions=selector))
        for selector in ("all", "generated", "30:90:2", "all", "sampled", "40:")
    ]
    with preemptions(llm) as found, drafts(monkeypatch):
        outs = generate(llm, batch((30, 31, 40, 33, 29, 35)), params)
    assert found, "nothing was preempted: this test shows nothing"
    for out in outs:
        check_gated(out, [probe], [], truth)


def test_metrics_that_the_sampler_of_drafts_does_not_serve(llm, root, monkeypatch):
    """Its outputs have no log-probabilities of chosen tokens; all of them they have."""
    clean, corrupt = tokens(20, 1), tokens(20, 2)
    for refused in (
        lambda: weir.sweep(llm, clean, corrupt, layers=1, positions=[-1], metric=weir.logit_diff(3, 4), progress=False),
        lambda: weir.fit(llm, [clean], [corrupt], layers=1, metric=weir.logit_diff(3, 4), progress=False),
    ):
        with pytest.raises(WeirError, match=r"speculative decoding .* weir\.on_logits") as error:
            refused()
        assert error.value.field == "metric"
    monkeypatch.setattr(llm.model_config, "max_logprobs", -1)
    metric = weir.on_logits(lambda logits: logits[3] - logits[4])
    found = weir.sweep(llm, clean, corrupt, layers=1, positions=[-1], metric=metric, progress=False)
    truth = reference(directory(root))
    for ids, value in zip((clean, corrupt), found.baseline, strict=True):
        logits = truth.logits(ids)[-1]
        assert close_logits(value, float(logits[3] - logits[4]), logits, truth.num_layers, D)


@pytest.mark.parametrize(
    "method",
    ["draft_model", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("ngram", "eagle", "eagle3"))],
)
def test_drafters_are_not_tapped(root, method, monkeypatch):
    """Also where they share the target's embedding, which is tapped."""
    model_dir = directory(root)
    llm = get_llm(model_dir, **ENGINE | {"speculative_config": drafting(model_dir, method)})
    truth = reference(model_dir)
    requests = [asking(selector, truth.num_layers, 60) for selector in SELECTORS]
    steered = weir.Add(torch.randn(D, generator=torch.Generator().manual_seed(4)), [1], 2.0, positions="31:50")
    outside = weir.params(
        sampling(60), interventions=steered, capture=[weir.Capture("embed"), weir.Capture("resid_post", [0, 1, 3])]
    )
    with drafts(monkeypatch, at_least=-1) as found:
        outs = llm.generate(batch(), [params for params, _ in requests], use_tqdm=False)
        (out,) = llm.generate(batch((30,)), outside, use_tqdm=False)
    assert found["rejected"] > 20 and (found["accepted"] > 20 or method != "draft_model"), found
    for one, (_, wanted) in zip(outs, requests, strict=True):
        verify(one, wanted, truth)
    ids = (list(out.prompt_token_ids) + list(out.outputs[0].token_ids))[:-1]
    rows, logits = truth.steered(ids, 30, [steered], sites=[("resid_post", 0)])
    assert list(out.outputs[0].token_ids) == logits[29:].argmax(-1).tolist()
    for layer in (0, 1, 3):
        assert rel_err(out.activations["resid_post", layer], rows["resid_post", layer]) <= BOUND
    assert rel_err(out.activations["embed", 0], truth.rows(ids, [("resid_pre", 0)])["resid_pre", 0]) <= BOUND
