"""Gated interventions on a live engine equal transformers with hooks that apply the same rule, token for token."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import assert_nothing_is_held, directory, frontend, prompts, sampling, tokens
from tests.engine.gated_programs import FORMS, intervention, make_program
from tests.engine.probe_cases import (
    BOUND,
    D,
    asked,
    check_gated,
    preemptions,
    random_probe,
    reference,
    same_scores,
    small_engine,
)
from tests.support.engines import get_llm
from tests.support.machine import BATCHES, cpu, needs
from tests.support.measure import rel_err
from tests.support.probe_reference import Act, GateCase, ProbeCase
from tests.support.sae_reference import Reference, weights
from tests.support.steered import chunks
from vllm_weir.errors import WeirError

pytestmark = pytest.mark.engine("default")
EVERYTHING = weir.Capture("resid_post")
MARGIN = 1e-4


@pytest.fixture
def truth(root):
    return reference(directory(root))


def add(positions="all", layers=2, seed=1, **more):
    v = torch.randn(D, generator=torch.Generator().manual_seed(seed))
    return functools.partial(weir.Add, v, layers, 2.0, positions=positions, **more)


def middle(truth, probe, ids, prompt_len):
    """A threshold that about half of a request's scores without interventions are above of, far from each of them."""
    scores = truth.gated(ids, prompt_len, [probe], []).scores[probe.name][1][:, 0].sort().values
    gaps = scores[1:] - scores[:-1]
    inner = slice(len(gaps) // 4, max(len(gaps) // 4 + 1, 3 * len(gaps) // 4))
    k = inner.start + int(gaps[inner].argmax())
    return float(scores[k] + gaps[k] / 2)


def run(llm, requests, max_tokens=6, **more):
    """Outputs of (prompt, probes, acts), with all of the stream captured."""
    params = [asked(sampling(max_tokens), probes, acts, capture=EVERYTHING, **more) for _, probes, acts in requests]
    return llm.generate([{"prompt_token_ids": ids} for ids, _, _ in requests], params, use_tqdm=False)


def fired_at(factors, at):
    return [p for p in at if factors[p]]


def told(gate):
    """The positions at which a receipt says that a gate let its intervention act."""
    at = [p for first, end in gate["spans"] for p in range(first, end)]
    assert gate["fired"] == len(at)
    return at


def check_receipt(out, k, act, traced, at):
    """The receipt says where the gate of the k-th intervention let it act."""
    gate, fired = out.receipt.gates[k], fired_at(traced.factors[k], at)
    assert (gate["probe"], told(gate), gate["of"]) == (act.gate.probe, fired, len(at))
    assert out.receipt.steered[k] and set(out.receipt.steered[k].values()) == {len(fired)}


@dataclass(frozen=True)
class CosineCase(ProbeCase):
    """What gives the cosine similarities that a gate by the probe `name`, less ``cosine:``, looks at."""

    def _outputs(self, h):
        weight = torch.atleast_2d(torch.as_tensor(self.tensors["weight"]).double()).flatten(1)
        return [torch.nn.functional.cosine_similarity(weight, row[None], dim=1) for row in h]

    def _activated(self, s):
        return s


@dataclass(frozen=True)
class CosineGate(GateCase):
    def public(self):
        return replace(super().public(), probe=self.probe.removeprefix("cosine:"), metric="cosine")


def cosine_of(probe):
    return CosineCase(**{f.name: getattr(probe, f.name) for f in fields(probe)} | {"name": f"cosine:{probe.name}"})


@pytest.mark.parametrize("size", [None, 23])
def test_gates_by_cosine_similarity(llm, truth, size):
    """Of a bias and an activation that do not count, of rows at several hook points, of one output of several."""
    llm.reset_prefix_cache()
    requests = []
    forms = [{}, {"latch": True}, {"sharpness": 9.0}, {"delay": 1}, {"output": 1}]
    for k, form in enumerate(forms):
        ids, site = tokens(30 + k, 50 + k), [("resid_post", 1), ("z", 1), ("mlp_post", 1), ("resid_pre", 1)][k % 4]
        smooth = ("ema", 0.5) if k == 0 else None
        probe = random_probe(
            "p", "linear", site, 50 + k, 2 if "output" in form else 1, activation="sigmoid", smooth=smooth
        )
        cosine = cosine_of(probe)
        scores = truth.gated(ids, len(ids), [cosine], []).scores[cosine.name][1][:, form.get("output", 0)]
        gate = CosineGate(cosine.name, above=float(scores.sort().values[len(ids) // 2 :][:2].mean()), **form)
        requests.append((ids, [probe], cosine, Act(add(seed=k), gate)))
    params = [asked(sampling(6), probes, [act], capture=EVERYTHING) for _, probes, _, act in requests]
    with chunks(llm, size):
        outs = llm.generate([{"prompt_token_ids": ids} for ids, *_ in requests], params, use_tqdm=False)
    for out, (ids, probes, cosine, act) in zip(outs, requests, strict=True):
        traced = check_gated(out, [*probes, cosine], [act], truth)
        assert float(out.scores[cosine.name].abs().max()) <= 1 + 1e-6
        (gate,) = out.receipt.gates
        at = list(range(len(ids) + 5))
        assert (gate["probe"], gate["metric"], told(gate)) == ("p", "cosine", fired_at(traced.factors[0], at))
        assert act.gate.sharpness or act.gate.latch or 0 < gate["fired"] < gate["of"]


def test_a_row_of_zeros_is_similar_to_nothing(llm):
    """Its similarity is 0: where the row was put to zero, `below` a negative number does not hold."""
    zero = weir.Replace(torch.zeros(D), 1, positions=[2, 3])
    v = torch.randn(D, generator=torch.Generator().manual_seed(0))
    params = weir.params(
        sampling(2),
        probes=weir.Probe("p", v, 3.0, "resid_post", 1),
        interventions=[zero, weir.Add(v, 2, when=weir.When("p", above=-1e-9, metric="cosine"))],
    )
    (out,) = llm.generate({"prompt_token_ids": tokens(9, 70)}, params, use_tqdm=False)
    assert out.scores["cosine:p"][2:4, 0].tolist() == [0.0, 0.0] and (out.scores["cosine:p"] != 0).sum() == 8
    assert {2, 3} <= set(told(out.receipt.gates[1]))


def test_a_cosine_gate_that_has_no_direction_is_refused(llm):
    v = torch.ones(D)
    probes = [
        weir.Probe("flat", 0 * v, 1.0, "resid_post", 1),
        weir.MLPProbe("mlp", v, 0.0, [1.0], 0.0, "resid_post", 1),
    ]
    wrong = (("flat", "length zero", "probe"), ("mlp", "no linear probe", "metric"), ("nobody", "", "probe"))
    for name, words, field in wrong:
        act = weir.Add(v, 2, when=weir.When(name, above=0.0, metric="cosine"))
        with pytest.raises(WeirError, match=words) as e:
            llm.generate(
                {"prompt_token_ids": tokens(9)},
                weir.params(sampling(2), probes=probes, interventions=act),
                use_tqdm=False,
            )
        assert e.value.field == f"interventions[0].when.{field}"


@pytest.mark.parametrize("size", [None, 23])
def test_every_form_of_gate(llm, truth, size):
    """delay x (switch, latch, sigmoid) x side: one batch, whole and in chunks; and what the receipts say."""
    llm.reset_prefix_cache()
    requests = []
    for delay in (0, 1):
        for more in ({}, {"latch": True}, {"sharpness": 3.0}):
            for side in ("above", "below"):
                k = len(requests)
                ids = tokens(30 + k, k)
                probe = random_probe("p", "linear", ("resid_post", 1), 20 + k)
                gate = GateCase("p", **{side: middle(truth, probe, ids, len(ids))}, delay=delay, **more)
                requests.append((ids, [probe], [Act(add(seed=k), gate)]))
    with chunks(llm, size):
        outs = run(llm, requests)
    counts = []
    for out, (ids, probes, acts) in zip(outs, requests, strict=True):
        traced = check_gated(out, probes, acts, truth)
        at = list(range(len(ids) + 5))
        check_receipt(out, 0, acts[0], traced, at)
        counts.append(len(fired_at(traced.factors[0], at)) / len(at))
    assert sum(0.1 < share < 0.9 for share in counts) >= 4, "gates that are open or shut all the time show little"
    del outs, out
    assert_nothing_is_held(llm)


def one_tap(truth):
    """Requests whose probe reads what leaves block 1, and whose gate acts where block 2 begins: the same rows."""
    requests = []
    kinds = [("linear", {}), ("mlp", {}), ("attention", {}), ("linear", {"smooth": ("ema", 0.4)})]
    for k, (more, side) in enumerate(itertools.product(({}, {"latch": True}, {"sharpness": 3.0}), ("above", "below"))):
        for delay in (0, 1):
            ids = tokens(26 + k, 500 + k)
            kind, how = kinds[len(requests) % len(kinds)]
            probe = random_probe("p", kind, ("resid_post", 1), 520 + k, **how)
            gate = GateCase("p", **{side: middle(truth, probe, ids, len(ids))}, delay=delay, **more)
            acts = [Act(add(layers=1, seed=k + 3)), Act(add(hook="resid_pre", seed=k), gate)]
            acts.append(Act(intervention("ablate", "resid_pre", [2], "generated", k)))
            requests.append((ids, [probe], acts))
    return requests


@pytest.mark.parametrize("size", [None, pytest.param(23, marks=pytest.mark.thorough)])
def test_a_gate_acts_at_the_tap_that_its_probe_reads(llm, truth, size):
    """Each form: the probe sees what acts at resid_post, and not what its gate lets act at resid_pre."""
    llm.reset_prefix_cache()
    requests = one_tap(truth)
    with chunks(llm, size):
        outs = run(llm, requests)
    fired = 0
    for out, (ids, probes, acts) in zip(outs, requests, strict=True):
        traced = check_gated(out, probes, acts, truth)
        check_receipt(out, 1, acts[1], traced, list(range(len(ids) + 5)))
        fired += 0.1 < len(fired_at(traced.factors[1], range(len(ids) + 5))) / (len(ids) + 5) < 0.9
    assert fired >= 4
    del outs, out
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("mode", ["compiled", "eager"])
def test_beside_functions_at_the_same_tap(llm, truth, mode):
    """One acts before the probe reads, in the same request, and one in another."""
    llm.reset_prefix_cache()
    ids = tokens(30, 610)
    doubles = functools.partial(weir.Add, torch.zeros(D), 1)
    item = SimpleNamespace(
        hook="resid_post", layers=(1,), vectors=(), neurons=None, heads=None, per_layer=False,
        positions=SimpleNamespace(to_json=lambda: "all"), changed=lambda h: 2 * h,
    )  # fmt: skip
    probe = random_probe("p", "linear", ("resid_post", 1), 611)
    gate = GateCase("p", above=2 * middle(truth, probe, ids, len(ids)))
    acts = [Act(doubles, None, item), Act(add(hook="resid_pre"), gate)]
    double = weir.Hook(double_row, layers=1, mode=mode)
    params = weir.params(
        sampling(6), probes=probe.public(), interventions=acts[1].public(), hooks=double, capture=EVERYTHING
    )
    other = weir.params(sampling(6), hooks=weir.Hook(double_row, hook="resid_pre", layers=2, mode=mode))
    requests = one_tap(truth)[:2]
    asks = [params, other, *(asked(sampling(6), *more, capture=EVERYTHING) for _, *more in requests)]
    prompts = [{"prompt_token_ids": one} for one in (ids, ids, *(ids for ids, *_ in requests))]
    out, _, *rest = llm.generate(prompts, asks, use_tqdm=False)
    check_gated(out, [probe], acts, truth)
    for one, (_, probes, acts) in zip(rest, requests, strict=True):
        check_gated(one, probes, acts, truth)
    late = weir.Hook(double_row, hook="resid_pre", layers=2, mode=mode)
    with pytest.raises(WeirError, match=r"resid_pre\[2\] after .* before that one") as error:
        llm.generate(prompts[0], weir.params(params, hooks=late))
    assert error.value.field == "hooks[0]"


def double_row(rows, ctx):
    return 2 * rows


def test_a_feature_under_a_gate(llm, truth):
    """`SetFeature` with `when`; the reference decodes with the feature changed, and keeps the error."""
    if "mid" not in {info.name for info in weir.saes(llm)}:
        sae = weir.SAE.from_tensors("standard", ("resid_post", 2), **weights("standard", 3, D, 64))
        weir.load_sae(llm, "mid", sae)
    sae = Reference("standard", weights("standard", 3, D, 64))
    ids = tokens(31, 90)
    probe = random_probe("p", "linear", ("resid_post", 1), 80)
    gate = GateCase("p", above=middle(truth, probe, ids, len(ids)))
    item = SimpleNamespace(
        hook="resid_post", layers=(2,), vectors=(), neurons=None, heads=None, per_layer=False,
        positions=SimpleNamespace(to_json=lambda: "all"),
        changed=lambda h: torch.from_numpy(sae.with_feature(h, 5, 4.0)).float(),
    )  # fmt: skip
    acts = [Act(functools.partial(weir.SetFeature, "mid", 5, value=4.0), gate, item)]
    (out,) = run(llm, [(ids, [probe], acts)])
    check_gated(out, [probe], acts, truth)
    weir.unload_sae(llm, "mid")


def test_several_gates_and_several_probes(llm, truth):
    """Gates that share a probe, and look at different outputs of it; interventions without a gate between them."""
    requests = []
    for k in range(6):
        ids = tokens(28 + k, 100 + k)
        one = random_probe("one", "linear", ("resid_post", 0), 100 + k, 3, activation="softmax")
        two = random_probe("two", "attention", ("z", 1), 200 + k, positions="3::2")
        low, high = middle(truth, one, ids, len(ids)), middle(truth, two, ids, len(ids))
        acts = [
            Act(add(layers=1, seed=k), GateCase("one", above=low)),
            Act(add(layers=[2, 3], seed=k + 9), GateCase("one", below=low, delay=1)),
            Act(add("generated", 2, seed=k + 5)),
            Act(add("prompt", 2, seed=k + 6), GateCase("two", above=high, latch=True)),
            Act(intervention("clamp", "resid_post", [3], "sampled", k), GateCase("one", above=0.3, output=2)),
            Act(intervention("ablate", "resid_pre", [3], "all", k), GateCase("two", below=high, sharpness=1.5)),
        ]
        requests.append((ids, [one, two], acts))
    for out, (_, probes, acts) in zip(run(llm, requests), requests, strict=True):
        traced = check_gated(out, probes, acts, truth)
        assert out.receipt.gates[2] is None and out.receipt.gates[0]["probe"] == "one"
        length = len(out.prompt_token_ids)
        assert told(out.receipt.gates[3]) == fired_at(traced.factors[3], range(length))


def test_a_probe_of_the_prompt_decides_on_what_is_generated(llm, truth):
    """CAST's shape: scored at the prompt's last token, steered from there on, for some of the prompts."""
    probe = random_probe("harm", "linear", ("resid_post", 1), 300, positions="last_prompt")
    texts = [tokens(20 + k, 120 + k) for k in range(12)]
    scores = [float(truth.gated(ids, len(ids), [probe], []).scores["harm"][1][0, 0]) for ids in texts]
    ordered = sorted(scores)
    k = max((5, 6, 7), key=lambda k: ordered[k] - ordered[k - 1])
    gate = GateCase("harm", above=(ordered[k] + ordered[k - 1]) / 2)
    acts = [Act(add("generated", [2, 3]), gate)]
    outs = run(llm, [(ids, [probe], acts) for ids in texts])
    plain = llm.generate([{"prompt_token_ids": ids} for ids in texts], sampling(6), use_tqdm=False)
    for out, score, stock in zip(outs, scores, plain, strict=True):
        check_gated(out, [probe], acts, truth)
        fired = score > gate.threshold
        assert (out.receipt.gates[0]["fired"], out.receipt.gates[0]["of"]) == (5 * fired, 5)
        if not fired:
            assert out.outputs[0].token_ids == stock.outputs[0].token_ids
    assert sum(out.outputs[0].token_ids != one.outputs[0].token_ids for out, one in zip(outs, plain)) >= 3


@needs(cpu(BATCHES))
def test_a_gate_that_stays_shut_leaves_every_bit(llm):
    """Negative zeros included: a factor of 0 adds nothing."""
    ids = tokens(40, 140)
    probe = random_probe("p", "linear", ("resid_post", 0), 400)
    kinds = [intervention(form, "resid_post", [1, 2], "all", k) for k, form in enumerate(FORMS)]
    shut = [Act(make, GateCase("p", above=1e6)) for make in kinds]
    for acts in (shut, [Act(one.make, GateCase("p", above=1e6, latch=True, delay=1)) for one in shut]):
        outs = []
        for params in (
            weir.params(sampling(6, logprobs=3), capture=EVERYTHING),
            asked(sampling(6, logprobs=3), [probe], acts, capture=EVERYTHING),
        ):
            llm.reset_prefix_cache()
            outs += llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        plain, gated = outs
        assert gated.outputs[0].token_ids == plain.outputs[0].token_ids
        assert gated.outputs[0].logprobs == plain.outputs[0].logprobs
        for site in plain.activations.sites:
            assert torch.equal(plain.activations[site].view(torch.int32), gated.activations[site].view(torch.int32))
        assert all(not gate["fired"] for gate in gated.receipt.gates)
        assert all(not any(sites.values()) for sites in gated.receipt.steered)


@pytest.mark.parametrize("count", [30, pytest.param(240, marks=pytest.mark.thorough)])
def test_random_programs(llm, truth, count):
    """Thresholds that a score comes near, and tokens that are nearly as likely as others, are left out."""
    llm.reset_prefix_cache()
    programs = [make_program(number, truth) for number in range(count)]
    every = {type(act.plain).__name__ for program in programs for act in program.acts if act.gate}
    assert every == {"Add", "Ablate", "Clamp", "Replace", "LowRank"}
    compared, fired, failures = 0, 0, []
    for first in range(0, len(programs), 60):
        some = programs[first : first + 60]
        params = [asked(sampling(p.max_tokens), p.probes, p.acts, capture=EVERYTHING) for p in some]
        with chunks(llm, 97 if first % 120 else None):
            outs = llm.generate([{"prompt_token_ids": p.prompt} for p in some], params, use_tqdm=False)
        for program, out in zip(some, outs, strict=True):
            try:
                traced = check_gated(out, program.probes, program.acts, truth, margin=MARGIN)
            except AssertionError as error:
                failures.append(f"{error}\n{program}")
                continue
            compared += traced is not None
            fired += traced is not None and any(any(f) for f, a in zip(traced.factors, program.acts) if a.gate)
    assert not failures, f"{len(failures)} of {len(programs)}; the first:\n{failures[0]}"
    assert compared >= 0.8 * count and fired >= 0.4 * count, (compared, fired)
    del outs, out
    assert_nothing_is_held(llm)


@pytest.mark.thorough
@pytest.mark.parametrize("room", [{}, {"max_probes": 24}], ids=["room for all", "room for a few"])
def test_five_hundred_gates_at_once(root, truth, room):
    """Four on each of 125 requests, no two the same. Where tables are small others wait, and nothing is dropped."""
    options = {"block_size": 32, "max_num_seqs": 128, "max_num_batched_tokens": 4096}
    llm = get_llm(directory(root), **options, additional_config={"weir": room})
    requests = []
    for k in range(125):
        ids = tokens(8 + k % 23, k)
        probe = random_probe("p", "linear", ("resid_post", 0), 600 + k)
        low = middle(truth, probe, ids, len(ids))
        gates = [GateCase("p", above=low), GateCase("p", below=low), GateCase("p", above=low, delay=1, latch=True)]
        gates += [GateCase("p", above=low, sharpness=1 + k / 50)]
        acts = [Act(add(layers=1 + j % 3, seed=1000 * j + k), gate) for j, gate in enumerate(gates)]
        requests.append((ids, [probe], acts))
    outs = run(llm, requests, max_tokens=3)
    compared = [
        check_gated(out, probes, acts, truth, margin=MARGIN)
        for out, (_, probes, acts) in zip(outs, requests, strict=True)
    ]
    assert sum(one is not None for one in compared) >= 110
    if room:
        many = [random_probe(f"p{k}", "linear", ("resid_post", 0), k) for k in range(25)]
        with pytest.raises(WeirError, match="max_probes") as error:
            llm.generate(prompts([8]), asked(sampling(2), many), use_tqdm=False)
        assert error.value.field == "probes"
    del outs
    assert_nothing_is_held(llm)


SHORT = [30, 31, 40, 33, 32, 35]
"""Lengths of prompts that do not fit the cache together once each has generated 90 tokens."""


@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_gates_survive_preemption(root, truth, caching):
    llm = small_engine(root, enable_prefix_caching=caching)
    requests = []
    for k, length in enumerate(SHORT):
        ids = tokens(length, 700 + k)
        probe = random_probe("early", "linear", ("resid_post", 0), 700 + k, smooth=("mean", 20))
        low = middle(truth, probe, ids, length)
        acts = [
            Act(add(layers=[1, 3], seed=k), GateCase("early", above=low, latch=k % 2 == 1)),
            Act(add(layers=1, seed=k + 9), GateCase("early", below=low, delay=1)),
        ]
        requests.append((ids, [probe], acts))
    with preemptions(llm) as found:
        outs = run(llm, requests, max_tokens=90)
    assert any(computed > 45 for computed in found), "nobody had generated tokens to compute again"
    checked = [
        check_gated(out, probes, acts, truth, margin=MARGIN)
        for out, (_, probes, acts) in zip(outs, requests, strict=True)
    ]
    assert sum(one is not None for one in checked) >= 5


def test_a_gate_before_its_probe_is_refused_once_tokens_are_computed_again_together(root, truth):
    """With delay=1 each token needs the score of the one before, which such a pass has not computed yet."""
    llm = small_engine(root, enable_prefix_caching=True)
    requests = []
    for k, length in enumerate(SHORT):
        ids = tokens(length, 700 + k)
        probe = random_probe("late", "attention", ("resid_post", 3), 800 + k)
        high = middle(truth, probe, ids, length)
        requests.append((ids, [probe], [Act(add("generated", 2, seed=k + 5), GateCase("late", above=high, delay=1))]))
    with preemptions(llm) as found, pytest.raises(WeirError, match="preempted") as error:
        run(llm, requests, max_tokens=90)
    assert any(computed > 45 for computed in found)
    right = 0
    for out, (_, probes, acts) in zip(error.value.outputs, requests, strict=True):
        try:
            _ = out.receipt
        except WeirError as e:
            assert "preempted" in e.message
        else:
            right += check_gated(out, probes, acts, truth, margin=MARGIN) is not None
    assert 1 <= right < len(requests)
    del error, out
    assert_nothing_is_held(llm)


def test_several_samples_under_a_gate(llm, truth):
    ids = tokens(33, 150)
    probe = random_probe("p", "linear", ("resid_post", 1), 900, 1, smooth=("ema", 0.5))
    acts = [Act(add(layers=[2, 3]), GateCase("p", above=middle(truth, probe, ids, 33), delay=1))]
    params = asked(sampling(8, temperature=1.0, seed=3, n=3), [probe], acts, capture=EVERYTHING)
    (out,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    for one in out.outputs:
        made = list(one.token_ids)
        traced = truth.gated((ids + made)[:-1], 33, [probe], acts)
        for layer in range(4):
            assert rel_err(one.activations["resid_post", layer], traced.rows["resid_post", layer]) <= BOUND
        same_scores(one.scores, probe, *traced.scores["p"], BOUND)


P = 100  # three blocks and four tokens


def cached(llm, ids, params):
    (out,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    return out


def test_blocks_under_a_gate_are_nobody_elses(llm, truth):
    """Blocks before the first position that a gated intervention may act at are shared, those after with nobody."""
    probe = random_probe("p", "linear", ("resid_post", 0), 901, positions="sampled")
    late = random_probe("p", "linear", ("resid_post", 0), 901, positions="70:")
    every = random_probe("p", "linear", ("resid_post", 0), 901)
    open_, shut = GateCase("p", above=-1e6), GateCase("p", above=1e6)
    ids = tokens(P, 160)
    plain = sampling(6)
    # (probe, intervention, blocks that a plain request finds afterwards, blocks that it finds after a plain one)
    cases = [
        (every, Act(add("all"), open_), 0, 0),
        (every, Act(add("all"), shut), 0, 0),
        (late, Act(add("70:"), open_), 64, 64),
        (late, Act(add("all"), open_), 64, 64),  # before the first score every gate is shut
        (probe, Act(add("generated"), open_), 96, 96),
        (probe, Act(add("-1:"), shut), 96, 96),
    ]
    for scored, act, after_it, after_plain in cases:
        gated = asked(sampling(6), [scored], [act], capture=weir.Capture("resid_post", positions="sampled"))
        llm.reset_prefix_cache()
        first = cached(llm, ids, gated)
        check_gated(first, [scored], [act], truth)
        assert first.num_cached_tokens == 0
        found = cached(llm, ids, plain)
        assert found.num_cached_tokens == after_it, (scored.positions, act)
        llm.reset_prefix_cache()
        stock = cached(llm, ids, plain)
        again = cached(llm, ids, gated)
        assert again.num_cached_tokens == after_plain, (scored.positions, act)
        check_gated(again, [scored], [act], truth)
        third = cached(llm, ids, gated)
        assert third.num_cached_tokens == after_plain, "nobody shares what a gate has decided on"
        assert found.outputs[0].token_ids == stock.outputs[0].token_ids == cached(llm, ids, plain).outputs[0].token_ids


def test_generated_blocks_under_a_gate_are_nobody_elses(llm, truth):
    """A prompt that holds a gated request's answer is computed anew from where the gate may have acted."""
    probe = random_probe("p", "linear", ("resid_post", 0), 902, positions="sampled")
    ids = tokens(P, 161)
    gated = asked(sampling(40), [probe], [Act(add("generated"), GateCase("p", above=-1e6))])
    llm.reset_prefix_cache()
    made = list(cached(llm, ids, gated).outputs[0].token_ids)
    assert cached(llm, ids + made, sampling(2)).num_cached_tokens == 96


def bad(layers=2, probe_at=("resid_post", 1), positions="all", **gate):
    probe = weir.Probe("p", torch.ones(2, D), torch.zeros(2), *probe_at)
    when = weir.When(**{"probe": "p", "above": 0.5, "output": 0} | gate)
    return weir.params(
        sampling(4), probes=[probe], interventions=weir.Add(torch.ones(D), layers, positions=positions, when=when)
    )


def written(**when):
    """A gate in the wire's own words."""
    item = {"op": "add", "vector": [1.0] * D, "layers": [2], "when": {"probe": "p"} | when}
    return sampling(2, extra_args={"weir": {"v": 1, "interventions": [item]}})


@pytest.mark.parametrize(
    ("make", "field", "says"),
    [
        (lambda: bad(probe="q"), "probe", "no probe"),
        (lambda: bad(output=2), "output", "2"),
        (lambda: bad(layers=1), "probe", "resid_post"),  # the same tap
        (lambda: bad(layers=0), "probe", "delay=1"),
        (lambda: bad(layers=0, delay=1), "delay", "resid_post"),  # a prompt's token would wait for one of its pass
        (lambda: written(above=0), "probe", "p"),
        (lambda: written(over=1), "", "over"),
    ],
)
def test_refusals(llm, make, field, says):
    """A WeirError that names the field; the engine lives on, and takes the same gate where it can be."""
    with pytest.raises(WeirError, match=says) as error:
        llm.generate(prompts([12]), make(), use_tqdm=False)
    assert error.value.field.startswith(f"interventions[0].when{'.' if field else ''}{field}"), error.value
    assert not llm.llm_engine.has_unfinished_requests() and frontend(llm).engine.refusal is None
    llm.generate(prompts([12]), bad(layers=0, delay=1, positions="generated"), use_tqdm=False)
