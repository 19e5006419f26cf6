"""Two ranks: under tensor parallelism both hold the same stream, and one of them sends it, or each its share; as stages
of a pipeline each has half of the blocks. Rows, steering, compression and the points inside blocks are what one rank
gives, and what transformers gives."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import SELECTORS, asking, directory, oracle, prompts, same_rows, sampling
from tests.engine.probe_cases import asked as probed
from tests.engine.probe_cases import check_gated, check_scores, random_probe, reference
from tests.engine.sae_cases import Decoded, Edited, Elsewhere, cross_layer, loading, random_sae, transcoder
from tests.engine.test_compress import SELECTORS as SOME
from tests.engine.test_compress import asked as compressed
from tests.engine.test_compress import decoded
from tests.engine.test_points import DENSE, EVERY, check_identities, off
from tests.engine.test_steer_processes import EVERYTHING, cases
from tests.support.engines import close_all, get_llm
from tests.support.hook_functions import output_weights, read_off
from tests.support.machine import GIB, binding, engine_processes, memory, needs, ranks
from tests.support.measure import rel_err
from tests.support.probe_reference import Act, GateCase
from tests.support.steered import check, idle, prompt, truth
from vllm_weir.schema.hooks import MODEL_HOOKS

pytestmark = [pytest.mark.engine, needs(engine_processes, memory(3 * GIB), ranks(2))]


class Ranks(NamedTuple):
    """An engine of two ranks, and which of them send: "first" or "split"; "stages" of a pipeline both do."""

    llm: object
    ship: str


def plain(llm, layers):
    return llm.generate(prompts(), [asking(s, layers)[0] for s in SELECTORS], use_tqdm=False)


def steered(llm):
    asked = cases(62)
    params = [weir.params(sampling(6), capture=EVERYTHING, interventions=c) for c in asked]
    return llm.generate([prompt(12 + 9 * k, k) for k in range(len(asked))], params, use_tqdm=False)


@pytest.fixture(scope="module")
def one(root):
    """What one rank gives: plain requests, and steered ones."""
    llm = get_llm(directory(root), block_size=32)
    found = plain(llm, oracle(directory(root)).num_layers), steered(llm)
    for outs in found:
        for out in outs:  # rows are assembled before their engine goes
            assert out.activations is not None
    close_all()
    return found


@pytest.fixture(
    scope="module", params=["split", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("first", "stages"))]
)
def two(root, one, request):
    close_all()
    env = {"VLLM_CPU_OMP_THREADS_BIND": binding(2)}
    if request.param == "stages":
        ranks = {"pipeline_parallel_size": 2}
    else:
        ranks = {"tensor_parallel_size": 2, "additional_config": {"weir": {"ship": request.param}}}
    yield Ranks(get_llm(directory(root), block_size=32, env=env, **ranks), request.param)
    close_all()


def test_rows(root, one, two):
    reference = oracle(directory(root))
    reports = two.llm.collective_rpc("weir_report")
    assert len(reports) == 2 and all(r["ring_rows"] for r in reports)
    for a, b in zip(one[0], plain(two.llm, reference.num_layers), strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        same_rows(b.activations, a.activations, 1e-4)
        ids = list(b.prompt_token_ids) + list(b.outputs[0].token_ids)
        rows = reference.rows(ids[:-1], map(tuple, b.activations.sites))
        for site in b.activations.sites:
            at = b.activations.positions_of(*site)
            if len(at):
                assert rel_err(b.activations[site], rows[tuple(site)][at]) <= 1e-4


def test_steering(root, one, two):
    outs = steered(two.llm)
    for out, case in zip(outs, cases(62), strict=True):
        check(out, case, truth(directory(root)), 1e-4)
    for a, b in zip(one[1], outs, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.receipt.steered == b.receipt.steered
        for site in a.activations.sites:
            assert rel_err(b.activations[site], a.activations[site]) <= 1e-4
    assert len(two.llm.collective_rpc("weir_usage")) == 2
    del outs, out, a, b
    assert idle(two.llm)


def test_compression(root, two):
    reference = oracle(directory(root))
    wanted = [(selector, how) for selector in SOME[:3] for how in ("full8", "rp8")]
    lengths = [20 + k for k in range(len(wanted))]
    outs = two.llm.generate(prompts(lengths), [compressed(*c) for c in wanted], use_tqdm=False)
    for out, (_, how) in zip(outs, wanted, strict=True):
        assert len(out.activations.sites) == 3
        if how == "full8":
            decoded(out, how, reference)


def test_points_inside_blocks(two):
    assert {v.hook for v in weir.sites(two.llm) if not v.supported} <= {"router_logits", "expert_ids", "expert_weights"}
    v = torch.randn(128, generator=torch.Generator().manual_seed(3))
    add = weir.Add(v, 1, 2.0, hook="attn_out")
    asked = [weir.params(sampling(6), capture=EVERY, interventions=i) for i in ([], [add])]
    before, after = two.llm.generate(prompts([20, 20])[:1] * 2, asked, use_tqdm=False)
    check_identities(before.activations, 4, 1e-5)
    check_identities(after.activations, 4, 1e-5)
    moved = after.activations["attn_out", 1][:20] - before.activations["attn_out", 1][:20]
    assert off(moved, (2.0 * v).expand(20, -1)) <= 1e-5


def test_directions_are_fitted_where_the_rows_are(root, two):
    """Each stage fits its blocks; rows whose parts lie on several ranks are joined, and fitted, here."""
    reference = oracle(directory(root))
    sides = [[prompt(9 + 30 * k, seed + k)["prompt_token_ids"] for k in range(5)] for seed in (0, 40)]
    for hook in ("resid_post", "mlp_post"):
        found = weir.fit(two.llm, *sides, hook=hook, positions="prompt", check=False, progress=False)
        in_parts = hook == "mlp_post" and two.ship != "stages"
        assert found.details["rows"] == ("caller" if in_parts else "workers")
        assert found.layers == tuple(range(reference.num_layers))
        for layer in found.layers:
            rows = [torch.stack([reference.rows(ids)[hook, layer].mean(0) for ids in side]) for side in sides]
            expected, length = rows[0].mean(0) - rows[1].mean(0), torch.cat(rows).norm(dim=1).mean()
            assert (found.vector(layer) - expected).norm() <= 1e-4 * length
    assert idle(two.llm)


def test_parts_of_a_row_come_back_whole(root, two):
    """Under tensor parallelism each rank has its heads and neurons, and sends those."""
    reference = oracle(directory(root))
    hooks = [hook for hook in DENSE if hook not in MODEL_HOOKS]
    captures = [weir.Capture(hook) for hook in hooks]
    picks = [weir.Capture("z", 1, heads=[3, 0]), weir.Capture("mlp_post", 2, neurons=[150, 1], reduce="mean")]
    asked = [weir.params(sampling(6), capture=captures), weir.params(sampling(6), capture=picks)]
    asked.append(sampling(6, extra_args={"output_qk": True}))
    whole, picked, lens = two.llm.generate(prompts([20])[:1] * 3, asked, use_tqdm=False)
    rows = reference.rows((list(whole.prompt_token_ids) + list(whole.outputs[0].token_ids))[:-1])
    for hook in hooks:
        for layer in range(reference.num_layers):
            got, expected = whole.activations[hook, layer], rows[hook, layer]
            assert got.shape == expected.shape, hook
            seen = expected.isfinite()
            assert torch.equal(seen, got.isfinite()) and rel_err(got[seen], expected[seen]) <= 1e-5, hook
    assert rel_err(picked.activations["z", 1], rows["z", 1][:, [3, 0]]) <= 1e-5
    assert rel_err(picked.activations["mlp_post", 2][0], rows["mlp_post", 2][:, [150, 1]].mean(0)) <= 1e-5
    for layer, meta in enumerate(lens.activations["qk_meta"]):
        assert rel_err(lens.activations["attn_q"][layer], rows["q_rot", layer]) <= 1e-5
        assert rel_err(lens.activations["attn_k"][layer], rows["k_rot", layer]) <= 1e-5
        assert (meta["num_heads_local"], meta["num_kv_heads_local"], meta["num_kv_heads_total"]) == (4, 2, 2)
    assert lens.activations["qk_layers"] == list(range(reference.num_layers))


def test_heads_are_steered_where_they_are(root, two):
    v = torch.randn(6, 32, generator=torch.Generator().manual_seed(5))
    edits = [
        [weir.Add(v[0], 1, 2.0, hook="z", heads=[0])],
        [weir.Add(v[1], 1, 2.0, hook="z", heads=[3]), weir.Ablate(v[2], [1, 2], hook="z", heads=[1, 2])],
        [
            weir.Replace(torch.zeros(32), 2, hook="k", heads=[1]),
            weir.Add(v[3], 1, hook="q", heads=[2], norm_match=True),
        ],
        [weir.Replace(torch.zeros(3), 1, hook="mlp_post", neurons=[0, 150, 151])],
        [weir.Add(v[:4].reshape(-1), 1, hook="z", positions="generated")],
    ]
    everything = [weir.Capture("z", [1, 2]), weir.Capture("resid_post")]
    params = [weir.params(sampling(6), capture=everything, interventions=edit) for edit in edits]
    outs = two.llm.generate([prompt(20 + k, k) for k in range(len(edits))], params, use_tqdm=False)
    for out, edit in zip(outs, edits, strict=True):
        check(out, edit, truth(directory(root)), 1e-4)
    if two.ship != "stages":
        with pytest.raises(weir.WeirError, match="in 2 parts") as error:
            two.llm.generate(
                [prompt(9)], weir.params(sampling(1), interventions=weir.Ablate(v[:4].reshape(-1), 1, hook="z"))
            )
        assert error.value.field == "interventions[0].hook"


def test_functions_have_weights_whole_and_whole_rows(root, two):
    """Each rank holds a part of the unembedding, or only the last stage has it; a part of a row reaches no function."""
    weights = truth(directory(root)).model.state_dict()
    params = weir.params(sampling(4), hooks=weir.Hook(read_off, layers=3), capture=weir.Capture("resid_post", 3))
    for _ in range(2):
        for out in two.llm.generate([prompt(12 + k, k) for k in range(4)], params, use_tqdm=False):
            wanted = out.activations["resid_post", 3] @ weights["lm_head.weight"].T
            assert rel_err(out.values["logits"], wanted) <= 1e-5
            assert torch.equal(out.values["gain"], weights["model.norm.weight"].expand_as(out.values["gain"]))
    refused = [(weir.Hook(output_weights, layers=1), "o_proj.weight is in a form of this processor's kernels")]
    if two.ship == "stages":
        refused = [(weir.Hook(read_off, layers=0), "other stages of the pipeline cannot be asked")]
    else:
        refused += [(weir.Hook(read_off, "z", heads=[0], layers=1), "in 2 parts; start the engine")]
    for hook, words in refused:
        with pytest.raises(weir.WeirError, match=words):
            [out.receipt for out in two.llm.generate(prompt(9), weir.params(sampling(1), hooks=hook), use_tqdm=False)]
    assert idle(two.llm)


def test_features_are_read_and_set(root, two):
    """Every rank has the autoencoders of its blocks: also those whose rows are encoded whole, and transcoders."""
    model = truth(directory(root))
    with loading(two.llm) as load:
        early = load("early", random_sae("jumprelu", ("resid_post", 1), 1))
        late = load("late", random_sae("topk", ("resid_post", 2), 2, k=24))
        coder = load("coder", transcoder("skip_transcoder", 3))
        across = load("across", cross_layer(seed=4))
        edits = [
            weir.SetFeature("early", 3, value=4.0),
            weir.SetFeature("late", 5, value=0.0, positions="prompt"),
            weir.SetFeature("late", 7, scale=-2.0, positions="generated"),
            weir.SetFeature("coder", 11, value=3.0),
            weir.SetFeature("across", 5, layer=2, value=3.0),
        ]
        moved = [Elsewhere(coder, edits[3]), Elsewhere(across.block(2), edits[4])]
        references = [[Edited(early, edits[0])], [Edited(late, edits[1])], [Edited(late, edits[2])]]
        references += [[*one.writes, one.reads] for one in moved]
        edits.append(weir.Reconstruct("late", positions="generated"))
        references.append([Decoded(late, edits[-1])])
        capture = [weir.Capture("resid_post"), weir.Capture("resid_pre"), weir.Capture("mlp_in")]
        read = [weir.Features(name, top_k=8) for name in ("early", "late", "coder", "across")]
        params = [weir.params(sampling(6), capture=capture, features=read, interventions=edit) for edit in edits]
        outs = two.llm.generate([prompt(12 + 9 * k, k) for k in range(6)], params, use_tqdm=False)
        for out, edit in zip(outs, references, strict=True):
            check(out, edit, model, 1e-4)
            values = [(out.features["early"], early), (out.features["late"], late)]
            values += [(one, across.block(layer)) for layer, one in out.features["across"].items()]
            assert len(values) == 6
            for found, sae in values:
                dense = sae.encode(out.activations[sae.site])
                assert len(found) == len(dense)
                assert (dense.gather(1, found.ids) - found.values).abs().max() <= 1e-4 * dense.abs().max()
        if two.ship == "stages":
            apart = weir.SetFeature("across", 5, layer=1, value=3.0)
            with pytest.raises(weir.WeirError, match="different pipeline stages; give add"):
                two.llm.generate([prompt(9)], weir.params(sampling(1), interventions=apart), use_tqdm=False)
            added = weir.SetFeature("across", 5, layer=1, add=3.0)
            (out,) = two.llm.generate([prompt(9)], weir.params(sampling(1), interventions=added), use_tqdm=False)
            assert set(out.receipt.steered[0]) == {("mlp_out", layer) for layer in (1, 2, 3)}
        del outs, out, found, values
    assert idle(two.llm)


def test_probes_and_gates(root, two):
    """Every rank has the scores that its gates need, and the caller gets them once."""
    oracle = reference(directory(root))
    scored = [
        [random_probe("a", "linear", ("resid_post", 1), 1, 3, activation="softmax")],
        [random_probe("b", "attention", ("resid_post", 3), 2), random_probe("c", "mlp", ("resid_mid", 3), 3, 2)],
        [random_probe("d", "linear", ("mlp_out", 0), 4, smooth=("mean", 4), positions="sampled")],
    ]
    outs = two.llm.generate(prompts([20, 31, 40]), [probed(sampling(6), one) for one in scored], use_tqdm=False)
    for out, probes in zip(outs, scored, strict=True):
        check_scores(out, probes, oracle, bound=1e-4)
    # On one stage of a pipeline, a probe and what it decides on.
    probe = random_probe("p", "linear", ("resid_post", 2), 5)
    vector = torch.randn(128, generator=torch.Generator().manual_seed(9))
    requests = []
    for k, more in enumerate(({}, {"latch": True}, {"delay": 1}, {"sharpness": 2.0})):
        gate = GateCase("p", above=0.05 + 0.1 * k, **more)
        requests.append([Act(lambda v=vector, **when: weir.Add(v, 3, 2.0, **when), gate)])
    everything = weir.Capture("resid_post")
    params = [probed(sampling(6), [probe], acts, capture=everything) for acts in requests]
    outs = two.llm.generate([prompt(24 + k, k) for k in range(4)], params, use_tqdm=False)
    traced = [
        check_gated(out, [probe], acts, oracle, bound=1e-4, margin=1e-3)
        for out, acts in zip(outs, requests, strict=True)
    ]
    assert sum(one is not None for one in traced) >= 3
    assert all(out.receipt.gates[0]["of"] == len(out.prompt_token_ids) + 5 for out in outs)
    rising = probed(sampling(12), [probe], stop_when="p > -1e6")
    (out,) = two.llm.generate([prompt(24)], rising, use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 1 and out.outputs[0].stop_reason == "probe:p"
    del outs, out
    assert idle(two.llm)


def test_what_ranks_cannot_score_together_is_refused(two):
    """Or done: rows in parts under tensor parallelism, and a probe and its intervention on different stages."""
    if two.ship == "stages":
        probe = random_probe("p", "linear", ("resid_post", 0), 6)
        params = probed(
            sampling(2), [probe], [Act(lambda **when: weir.Add(torch.ones(128), 3, **when), GateCase("p", above=0.0))]
        )
        field = "interventions[0].when"
    else:
        params, field = probed(sampling(2), [random_probe("p", "linear", ("mlp_post", 1), 6)]), "probes[0].hook"
    with pytest.raises(weir.WeirError) as error:
        two.llm.generate([prompt(9)], params, use_tqdm=False)
    assert error.value.field.startswith(field)
