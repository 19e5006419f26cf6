"""Speculative decoding on CUDA: every drafter, with and without CUDA graphs and asynchronous scheduling."""

from __future__ import annotations

import random
from importlib.metadata import version

import pytest
import torch

from tests.support.draft_models import drafting
from tests.support.engines import close_all, get_llm
from tests.support.machine import needs, on_cpu
from tests.support.measure import rel_err
from tests.support.steered import SteeredOracle
from vllm_weir.worker.planning.drafts import DraftLedger

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
METHODS = ("ngram", "draft_model", "eagle", "eagle3")
MADE, BOUND = 40, 1e-2  # attention in float32 rounds its products as TF32 there
D = 128


def sound_draft_models():
    """Need a vLLM that compiles a draft model for as many tokens as it gives it."""
    newest = not on_cpu() and version("vllm").startswith("0.33.")
    return "stock vLLM 0.33 gives a draft model more tokens" if newest else None


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((m, ahead), marks=[needs(sound_draft_models)] if m == "draft_model" else [])
        for m in METHODS
        for ahead in (False, True)
        if m != "ngram" or not ahead
    ],
    ids=str,
)
def llm(request, directory):
    method, ahead = request.param
    yield get_llm(
        directory,
        enforce_eager=False,
        kv_cache_memory_bytes=1 << 30,
        max_num_batched_tokens=256,
        max_num_seqs=64,
        async_scheduling=ahead,
        speculative_config=drafting(directory, method),
    )
    close_all()


def vector(seed=2):
    return torch.randn(D, generator=torch.Generator().manual_seed(seed))


def kinds():
    import vllm_weir as weir

    probe = weir.Probe("p", vector(5)[None] / D, torch.zeros(1), "resid_post", 1, smooth=("ema", 0.3))
    add = weir.Add(vector(), [1], 3.0)
    return {
        "plain": {},
        "read": {"capture": weir.Capture("resid_post")},
        "some": {"capture": weir.Capture("resid_post", positions="20:50:3")},
        "steer": {"capture": weir.Capture("resid_post"), "interventions": [add]},
        "part": {
            "capture": weir.Capture("resid_post"),
            "interventions": [
                weir.Add(vector(), [1], 3.0, positions="-3:45"),
                weir.Ablate(vector(3), [2], positions=[30, 41]),
            ],
        },
        "score": {"probes": [probe], "capture": weir.Capture("resid_post", positions="generated")},
    }


def crowd(count, seed):
    rng = random.Random(seed)
    names = list(kinds())
    for _ in range(count):
        length = rng.choice((1, 7, 24, 40, 150))
        fitting = names if 20 < length < 48 else ("plain", "read", "steer")  # "-3:45" is empty behind a longer prompt
        yield [rng.randrange(5, 500) for _ in range(length)], rng.choice(fitting)


def ask(kind):
    from vllm import SamplingParams

    import vllm_weir as weir

    base = SamplingParams(max_tokens=MADE, temperature=0, ignore_eos=True)
    return weir.params(base, **kinds()[kind]) if kinds()[kind] else base


def check(out, kind, truth):
    prompt_len, made = len(out.prompt_token_ids), list(out.outputs[0].token_ids)
    ids = (list(out.prompt_token_ids) + made)[:-1]
    rows, _ = truth.steered(ids, prompt_len, kinds()[kind].get("interventions", []))
    assert len(made) == MADE
    for site in out.activations.sites:
        at = out.activations.positions_of(*site)
        if kind in ("read", "steer", "part"):
            assert at.tolist() == list(range(len(ids)))
        assert rel_err(out.activations[site], rows[tuple(site)][at]) <= BOUND, (kind, site)
    if kind == "score":
        raw = rows["resid_post", 1].double() @ (vector(5).double() / D)
        smooth = [float(raw[0])]
        for value in raw[1:].tolist():
            smooth.append(0.3 * value + 0.7 * smooth[-1])
        assert (out.scores["p"][:, 0].double() - torch.tensor(smooth).double()).abs().max() <= BOUND


def test_a_crowd_has_no_wrong_row(llm, directory):
    truth = SteeredOracle(directory)
    for seed in range(4):
        asked = list(crowd(48, seed))
        params = [ask(kind) for _, kind in asked]
        outs = llm.generate([{"prompt_token_ids": ids} for ids, _ in asked], params, use_tqdm=False)
        for out, (_, kind) in zip(outs, asked, strict=True):
            if kind != "plain":
                check(out, kind, truth)


def test_neighbours_and_aborted_requests(llm):
    """Plain requests get the same tokens beside others, and what is aborted leaves nothing."""
    plain = [{"prompt_token_ids": [k + 5 * j % 400 for j in range(1, 30)]} for k in range(8)]
    alone = llm.generate(plain, [ask("plain")] * 8, use_tqdm=False)
    mixed = [p for prompt in plain for p in (prompt, prompt)]
    beside = llm.generate(mixed, [ask("plain"), ask("part")] * 8, use_tqdm=False)[::2]
    same = sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(alone, beside, strict=True))
    assert same == len(plain)
    engine = llm.llm_engine
    for k in range(200):
        engine.add_request(f"gone{k}", plain[k % 8], ask("part" if k % 2 else "score"))
        if k % 10 == 9:
            engine.step()
            engine.step()
            engine.abort_request([f"gone{n}" for n in range(k - 9, k + 1)])
    while engine.has_unfinished_requests():
        engine.step()
    llm.generate(plain[0], ask("plain"), use_tqdm=False)
    (used,) = llm.collective_rpc("weir_usage")
    assert not any(count for name, count in used.items() if name != "host_rows"), used


def test_drafts_are_accepted_and_rejected(llm, monkeypatch):
    """Else the other tests of this file show nothing."""
    found, verify_step = [0, 0], DraftLedger.verify

    def counting(self, step, sampled):
        verified = verify_step(self, step, sampled)
        held = verified.ends - verified.first_tokens
        found[0] += int((held - (step.counts - step.drafts)).sum())
        found[1] += int((step.counts - held).sum())
        return verified

    monkeypatch.setattr(DraftLedger, "verify", counting)
    llm.generate([{"prompt_token_ids": list(range(5, 40)) * 2}] * 8, [ask("read")] * 8, use_tqdm=False)
    assert found[1] > 20, found
