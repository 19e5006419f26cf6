"""Reductions and products with directions: what plain rows, reduced by hand, give."""

from __future__ import annotations

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import BOUND, assert_nothing_is_held, prompts, sampling, tokens
from tests.support.check import expected_positions
from tests.support.measure import close_products
from tests.support.steered import chunks

pytestmark = pytest.mark.engine("default")
SELECTORS = ["all", "prompt", "generated", "last_prompt", "sampled", [0, 3, -1], "2:40:3", {"token_ids": [5, 6, 7, 8]}]
SCORED = (("resid_post", 3), ("resid_pre", 0))
REDUCE = {"last": lambda x: x[-1:], "mean": lambda x: x.mean(0, keepdim=True), "max": lambda x: x.amax(0, keepdim=True)}


def asked(selector, max_tokens=7, **postprocess):
    captures = [
        weir.Capture("resid_post", [0, 2], selector, **postprocess),
        weir.Capture("resid_pre", [3], selector, **postprocess),
    ]
    return weir.params(sampling(max_tokens), capture=captures)


def expected(out, truth, selector, site):
    ids = list(out.prompt_token_ids) + list(out.outputs[0].token_ids)
    P, G = len(out.prompt_token_ids), len(out.outputs[0].token_ids)
    at = expected_positions(selector, P, G, ids)
    return at, truth.rows(ids[:-1], [tuple(site)])[tuple(site)][at].double()


@pytest.mark.parametrize("size", [None, 7])
def test_reductions(llm, truth, size):
    """Every reduction over every kind of selector, in one batch, with whole and with chunked prompts."""
    cases = [(selector, how) for selector in SELECTORS for how in REDUCE]
    with chunks(llm, size):
        outs = llm.generate(
            prompts([5 + k for k in range(len(cases))]), [asked(s, reduce=h) for s, h in cases], use_tqdm=False
        )
    for out, (selector, how) in zip(outs, cases, strict=True):
        acts = out.activations
        for site in acts.sites:
            at, rows = expected(out, truth, selector, site)
            assert acts[site].shape == (min(1, len(at)), 128) and acts.positions_of(*site).tolist() == at[-1:]
            if at:
                reference = REDUCE[how](rows)
                assert (acts[site].double() - reference).abs().max() <= BOUND * rows.abs().max()
        assert set(out.receipt.captured.values()) == {min(1, len(at))} and not out.receipt.dropped
    del out, outs, acts
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("how", [None, *REDUCE])
def test_products_with_directions(llm, truth, how):
    directions = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    directions[2] = directions[0]  # the same one twice
    weir.register(llm, "probe", directions[1])
    for project, D in ((directions, directions), ("probe", directions[1:2])):
        with chunks(llm, 9):
            ask = [asked(s, reduce=how, project=project) for s in SELECTORS]
            outs = llm.generate(prompts([6 + k for k in range(len(ask))]), ask, use_tqdm=False)
        for out, selector in zip(outs, SELECTORS, strict=True):
            for site in out.activations.sites:
                at, rows = expected(out, truth, selector, site)
                reference = rows @ D.double().T
                got = out.activations[site]
                assert got.dtype == torch.float32 and got.shape[1] == len(D)
                if how is not None and at:
                    reference, at = REDUCE[how](reference), at[-1:]
                assert out.activations.positions_of(*site).tolist() == at and len(got) == len(at)
                if at:
                    assert (got.double() - reference).abs().max() <= BOUND * (
                        rows.norm(dim=1).max() * D.norm(dim=1).max()
                    )
    weir.unregister(llm, "probe")


def test_beside_plain_requests_and_steering(llm, truth):
    """A batch of everything: treated rows see the request's own steering, neighbours their own rows."""
    v = torch.ones(128)
    base = sampling(6)
    steer = weir.Add(v, 1, 2.0, positions="prompt")
    plain = weir.params(base, capture=weir.Capture("resid_post", [1]), interventions=steer)
    mean = weir.params(base, capture=weir.Capture("resid_post", [1], reduce="mean"), interventions=steer)
    score = weir.params(base, capture=weir.Capture("resid_post", [1], project=v), interventions=steer)
    for _ in range(3):
        outs = llm.generate(prompts([12] * 4), [plain, mean, score, base], use_tqdm=False)
        again = llm.generate(prompts([12] * 4)[:3], [plain] * 3, use_tqdm=False)
        rows = [o.activations["resid_post", 1] for o in again]
        reduced, scored = (out.activations["resid_post", 1] for out in outs[1:3])
        assert (reduced - rows[1].mean(0, keepdim=True)).abs().max() <= BOUND * rows[1].abs().max()
        assert close_products(scored, rows[2], v[None])
        assert outs[3].outputs[0].token_ids == truth.greedy(tokens(12, 3), 6) and outs[3].activations is None


def test_every_site_of_a_request_may_become_something_else(llm, truth):
    """Rows, scores and reductions over different positions in one request, also of a prompt that comes in chunks."""
    v = torch.linspace(-1, 1, 128)
    capture = [
        weir.Capture("resid_post", 0, "prompt", reduce="mean"),
        weir.Capture("resid_post", 1),
        weir.Capture("resid_post", 2, "generated", reduce="max", dtype="float16"),
        weir.Capture("resid_post", 3, project=v),
        weir.Capture("resid_pre", 0, "last_prompt", project=v, reduce="last"),
        weir.Capture("resid_pre", 1, [40, 2]),
        weir.Capture("resid_pre", 3, {"token_ids": [513]}, reduce="mean"),
    ]
    P, G = 11, 5
    for chunk in (None, 4):
        with chunks(llm, chunk):
            (out,) = llm.generate(prompts([P]), weir.params(sampling(G), capture=capture), use_tqdm=False)
        acts = out.activations
        ids = (list(out.prompt_token_ids) + list(out.outputs[0].token_ids))[:-1]
        every = truth.rows(ids, map(tuple, acts.sites))
        size = {site: every[site].norm(dim=1).max() * (v.norm() if site in SCORED else 1) for site in every}
        post = [every["resid_post", layer].double() for layer in range(4)]
        pre = [every["resid_pre", layer].double() for layer in range(4)]
        wanted = {
            ("resid_post", 0): ([P - 1], post[0][:P].mean(0, keepdim=True)),
            ("resid_post", 1): (list(range(P + G - 1)), post[1]),
            ("resid_post", 2): ([P + G - 2], post[2][P:].amax(0, keepdim=True)),
            ("resid_post", 3): (list(range(P + G - 1)), post[3] @ v.double()[:, None]),
            ("resid_pre", 0): ([P - 1], (pre[0] @ v.double()[:, None])[P - 1 : P]),
            ("resid_pre", 1): ([2], pre[1][2:3]),
            ("resid_pre", 3): ([], torch.zeros(0, 128)),
        }
        assert set(map(tuple, acts.sites)) == set(wanted)
        for site, (at, rows) in wanted.items():
            assert acts.positions_of(*site).tolist() == at and acts[site].shape == rows.shape
            assert acts[site].dtype == (torch.float16 if site == ("resid_post", 2) else torch.float32)
            if at:
                bound = 2**-11 if site == ("resid_post", 2) else BOUND  # float16 rounds more
                assert (acts[site].double() - rows).abs().max() <= bound * size[site]
        assert out.receipt.captured == {site: len(at) for site, (at, _) in wanted.items()} and not out.receipt.dropped


def test_streaming_gives_a_reduction_when_it_is_complete(llm):
    from vllm.sampling_params import RequestOutputKind

    for kind in (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA):
        params = asked("all", 4, reduce="max")
        params.output_kind = kind
        llm.llm_engine.add_request("r", {"prompt_token_ids": tokens(9)}, params)
        sizes = []
        while llm.llm_engine.has_unfinished_requests():
            sizes += [len(o.activations["resid_post", 0]) for o in llm.llm_engine.step()]
        assert sizes == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("captures", "field"),
    [
        ([{"reduce": "sum"}], "capture[0].reduce"),
        ([{"reduce": ["mean"]}], "capture[0].reduce"),
        ([{"project": [1.0, 2.0]}], "capture[0].project"),
        ([{"project": "nobody"}], "capture[0].project"),
        ([{"project": [[float("nan")] * 128]}], "capture[0].project"),
        ([{"project": torch.zeros(300, 128)}], "capture[0].project"),
        ([{"layers": 0, "reduce": "mean"}, {"layers": 0}], "capture[1].reduce"),
        ([{"layers": 0}, {"layers": [1, 0], "project": torch.ones(128)}], "capture[1].project"),
        ([{"layers": 0, "reduce": "mean"}, {"layers": 0, "reduce": "mean", "positions": 0}], "capture[1].positions"),
        ([{"layers": 0, "reduce": "mean"}, {"layers": 1, "compress": "full8"}], "capture[1].compress"),
    ],
)
def test_what_cannot_be_done_is_refused(llm, captures, field):
    with pytest.raises(weir.WeirError) as e:
        llm.generate(prompts([4]), weir.params(sampling(2), capture=captures), use_tqdm=False)
    assert e.value.field == field
    assert not llm.llm_engine.has_unfinished_requests()
