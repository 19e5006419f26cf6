"""Gates by a feature of an autoencoder: transformers with hooks that compute the activation and apply the rule."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import assert_nothing_is_held, directory, sampling, tokens
from tests.engine.probe_cases import D, check_gated, reference
from tests.engine.sae_cases import D_HEAD, loading, random_sae, transcoder
from tests.support.machine import BATCHES, cpu, needs
from tests.support.probe_reference import Act, GateCase, ProbeCase
from tests.support.sae_reference import Reference
from vllm_weir.errors import WeirError

pytestmark = pytest.mark.engine("default")
EVERYTHING = weir.Capture("resid_post")


@dataclass(frozen=True)
class FeatureCase(ProbeCase):
    """What gives a feature's activation, as a probe of the reference."""

    sae: Any = None
    feature: int = 0

    def _outputs(self, h):
        options = {name: getattr(self.sae.config, name) for name in ("apply_b_dec_to_input", "k")}
        found = Reference(self.sae.architecture, dict(self.sae.tensors), **options).encode(h)[:, self.feature]
        return [torch.tensor([float(one)], dtype=torch.float64) for one in found]


@dataclass(frozen=True)
class FeatureGate(GateCase):
    feature: int = 0

    def public(self):
        bound = {"above": self.above} if self.above is not None else {"below": self.below}
        name = self.probe.partition("[")[0]
        return weir.When(
            name, **bound, latch=self.latch, delay=self.delay, sharpness=self.sharpness, feature=self.feature
        )


@pytest.fixture
def truth(root):
    return reference(directory(root))


@pytest.fixture
def loaded(llm):
    with loading(llm) as load:
        yield load


def add(hook="resid_post", layers=2, seed=1, positions="all", **more):
    v = torch.randn(D, generator=torch.Generator().manual_seed(seed))
    return functools.partial(weir.Add, v, layers, 2.0, hook=hook, positions=positions, **more)


CASES = [  # architecture, what it reads, how, where it acts: where it reads, a later hook point, or the same rows
    ("standard", ("resid_post", 2), {}, ("resid_post", 2), {}),
    ("standard", ("resid_post", 1), {"apply_b_dec_to_input": True}, ("resid_pre", 2), {"latch": True}),
    ("gated", ("resid_pre", 2), {}, ("resid_pre", 2), {"sharpness": 2.0}),
    ("gated", ("resid_pre", 0), {"apply_b_dec_to_input": True}, ("resid_pre", 0), {}),
    ("jumprelu", ("resid_pre", 2), {}, ("resid_post", 1), {"delay": 1}),
    ("jumprelu", ("resid_post", 1), {}, ("resid_post", 2), {"sharpness": 1.0}),
    ("jumprelu", ("mlp_post", 1), {}, ("resid_post", 2), {}),
    ("batchtopk", ("mlp_out", 1), {"apply_b_dec_to_input": True}, ("mlp_out", 1), {"latch": True, "delay": 1}),
    ("jumprelu", ("z", 1), {"head": 2, "d_in": D_HEAD}, ("resid_post", 1), {}),
    ("jumprelu_transcoder", ("mlp_in", 1), {}, ("mlp_out", 1), {}),
]


def case_of(name, sae, feature, acting):
    """The probe of the reference: where the autoencoder reads, or first at the rows where this acts."""
    site, before = tuple(sae.site), False
    if site == acting or ({site, acting} == {("resid_pre", 2), ("resid_post", 1)} and acting[0] == "resid_post"):
        site, before = acting, True
    return FeatureCase(
        f"sae:{name}[{feature}]", *site, "linear", {}, head=sae.head, before=before, sae=sae, feature=feature
    )


def bounds(truth, probe, ids):
    """Two thresholds that some of the activations are above of: one among those that are not 0, and one below them."""
    found = truth.gated(ids, len(ids), [probe], []).scores[probe.name][1][:, 0].sort().values
    positive = found[found > 0]
    k = int((positive[1:] - positive[:-1]).argmax())
    return float((positive[k] + positive[k + 1]) / 2), float(positive[0]) / 2


def lively(truth, name, sae, acting, ids):
    """A feature that is active at some of the positions of a prompt, and not at others."""
    for feature in range(sae.d_sae):
        probe = case_of(name, sae, feature, acting)
        scores = truth.gated(ids, len(ids), [probe], []).scores[probe.name][1]
        if 5 <= int((scores > 0).sum()) <= len(ids) - 5:
            return probe
    raise AssertionError("no feature of this autoencoder says much")


def requests_of(truth, name, sae, acting, form):
    ids = tokens(26, 40)
    probe = lively(truth, name, sae, acting, ids)
    inside, low = bounds(truth, probe, ids)
    for k, rule in enumerate(({"above": inside}, {"below": inside}, {"below": low}, {"above": low})):
        gate = FeatureGate(probe.name, **rule, **form, feature=probe.feature)
        first = Act(add(*acting, seed=k + 10))  # before it, at the same hook point
        yield ids, probe, [first, Act(add(*acting, seed=k), gate), Act(add("resid_post", 3, seed=k + 20))]


@pytest.mark.parametrize(("architecture", "site", "how", "acting", "form"), CASES)
def test_it_is_the_model_with_the_rule_in_a_hook(llm, truth, loaded, architecture, site, how, acting, form):
    llm.reset_prefix_cache()
    sae = transcoder(architecture, 3) if "transcoder" in architecture else random_sae(architecture, site, 3, **how)
    loaded("it", sae)
    cases = list(requests_of(truth, "it", sae, acting, form))
    params = [
        weir.params(sampling(6), interventions=[act.public() for act in acts], capture=EVERYTHING)
        for _, _, acts in cases
    ]
    outs = llm.generate([{"prompt_token_ids": ids} for ids, *_ in cases], params, use_tqdm=False)
    shares = []
    for out, (ids, probe, acts) in zip(outs, cases, strict=True):
        traced = check_gated(out, [probe], acts, truth)
        gate, at = out.receipt.gates[1], [p for p in range(len(ids) + 5) if traced.factors[1][p]]
        assert (gate["probe"], gate["feature"], gate["fired"]) == ("sae:it", probe.feature, len(at))
        assert [p for first, end in gate["spans"] for p in range(first, end)] == at
        shares.append(len(at) / (len(ids) + 5))
    assert form or sum(0.1 < share < 0.9 for share in shares) >= 1
    del outs, out
    weir.unload_sae(llm, "it")
    assert_nothing_is_held(llm)


def test_thresholds_below_zero_and_at_the_autoencoder_s_own(llm, truth, loaded):
    """Activations are 0 where a feature is not active: above a negative number always, below 0 never."""
    ids, acting = tokens(26, 41), ("resid_post", 2)
    sae = loaded("it", random_sae("jumprelu", acting, 3))
    probe = lively(truth, "it", sae, acting, ids)
    active = truth.gated(ids, len(ids), [probe], []).scores[probe.name][1][:, 0] > 0
    own = sae.feature_response(probe.feature).theta
    assert own > 0
    always, never = [True] * len(ids), [False] * len(ids)
    rules = [
        ({"above": -0.5}, always),
        ({"below": -0.5}, never),
        ({"below": 0}, never),
        ({"above": 0}, active.tolist()),
    ]
    rules += [({"above": own / 2}, active.tolist()), ({"below": own / 2}, (~active).tolist())]
    params = [
        weir.params(
            sampling(1),
            interventions=add(when=weir.When("sae:it", feature=probe.feature, **rule), positions="prompt")(),
        )
        for rule, _ in rules
    ]
    for out, (rule, wanted) in zip(
        llm.generate([{"prompt_token_ids": ids}] * 6, params, use_tqdm=False), rules, strict=True
    ):
        spans = out.receipt.gates[0]["spans"]
        assert [any(a <= p < b for a, b in spans) for p in range(len(ids))] == wanted, rule


@needs(cpu(BATCHES))
def test_one_feature_for_several_interventions_and_one_set_where_it_is_active(llm, truth, loaded):
    """Read at its own hook point before what acts there, and after it for what acts later; and neighbours."""
    llm.reset_prefix_cache()
    ids, site = tokens(26, 42), ("resid_post", 1)
    sae = loaded("it", random_sae("jumprelu", site, 5))
    probe = lively(truth, "it", sae, site, ids)
    feature, own = probe.feature, Reference("jumprelu", dict(sae.tensors))
    item = SimpleNamespace(
        hook="resid_post", layers=(1,), vectors=(), neurons=None, heads=None, per_layer=False,
        positions=SimpleNamespace(to_json=lambda: "all"),
        changed=lambda h: torch.from_numpy(own.with_feature(h, feature, 0.0)).float(),
    )  # fmt: skip
    off = functools.partial(weir.SetFeature, "it", feature, value=0.0)
    after = FeatureCase(f"sae:it[{feature}] at resid_post[1]", *site, "linear", {}, sae=sae, feature=feature)
    acts = [
        Act(off, FeatureGate(probe.name, above=bounds(truth, probe, ids)[0], feature=feature), item),
        Act(add(seed=3, positions="prompt"), FeatureGate(after.name, below=0.1, feature=feature)),
        Act(add(layers=3, seed=4), FeatureGate(after.name, above=0.1, feature=feature)),
    ]
    plain = weir.params(sampling(6), capture=EVERYTHING)
    gated = weir.params(plain, interventions=[act.public() for act in acts])
    prompts = [{"prompt_token_ids": one} for one in (ids, tokens(19, 43))]
    out, beside = llm.generate(prompts, [gated, plain], use_tqdm=False)
    check_gated(out, [probe, after], acts, truth)
    llm.reset_prefix_cache()
    first, alone = llm.generate(prompts, [plain, plain], use_tqdm=False)
    assert first.outputs[0].token_ids and beside.outputs[0].token_ids == alone.outputs[0].token_ids
    assert all(torch.equal(beside.activations[one], alone.activations[one]) for one in alone.activations.sites)


def test_it_is_read_where_its_intervention_acts(llm, loaded):
    ids, acting = tokens(26, 44), ("resid_post", 2)
    loaded("it", random_sae("standard", acting, 3))
    for form, positions in (({}, list(range(26, 31))), ({"latch": True}, list(range(31)))):
        gate = weir.When("sae:it", feature=4, above=0.2, **form)
        params = weir.params(sampling(6), interventions=add(positions="generated", when=gate)())
        (out,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        assert out.scores.positions["sae:it[4]"].tolist() == positions


def test_what_is_refused(llm, loaded):
    loaded("it", random_sae("standard", ("resid_post", 2), 3))
    loaded("top", random_sae("topk", ("resid_post", 1), 3, k=9))
    rows = loaded("norm", random_sae("standard", ("resid_post", 1), 3, normalize_activations="layer_norm"))
    assert rows.config.encodes_rows

    def refused(when, field, message, **more):
        with pytest.raises(WeirError, match=message) as error:
            gate = weir.When(**{"above": 1.0} | when)
            llm.generate({"prompt_token_ids": [5]}, weir.params(sampling(1), interventions=add(when=gate, **more)()))
        assert error.value.field.endswith(field), error.value.field

    refused({"probe": "sae:other", "feature": 1}, "interventions[0].when.probe", "loaded are it, norm, top")
    refused({"probe": "sae:it", "feature": 96}, "interventions[0].when.feature", "from 0 to 95")
    refused({"probe": "sae:it"}, "interventions[0].when.feature", "missing")
    refused({"probe": "sae:it", "feature": -1}, "when.feature", "ints from 0")
    refused({"probe": "it", "feature": 1}, "when.probe", "'sae:NAME'")
    refused({"probe": "sae:it", "feature": 1, "output": 0}, "when.output", "leave output out")
    for name in ("top", "norm"):
        refused({"probe": f"sae:{name}", "feature": 1}, "interventions[0].when.probe", "whole row")
    refused({"probe": "sae:it", "feature": 1}, "interventions[0].when.probe", "has to come before", layers=1)


def test_what_every_request_undergoes(llm, truth, loaded):
    """`set_global` knows it, and the autoencoder stays as long as that does."""
    ids, acting = tokens(26, 45), ("resid_post", 2)
    sae = loaded("it", random_sae("jumprelu", acting, 3))
    probe = lively(truth, "it", sae, acting, ids)
    gate = FeatureGate(probe.name, above=0.0, feature=probe.feature)
    weir.set_global(llm, [add(when=gate.public())()])
    try:
        (out,) = llm.generate({"prompt_token_ids": ids}, weir.params(sampling(6), capture=EVERYTHING), use_tqdm=False)
        with pytest.raises(WeirError, match="gated by a feature of 'it'"):
            weir.unload_sae(llm, "it")
    finally:
        weir.clear_global(llm)
    check_gated(out, [probe], [Act(add(), gate)], truth)
