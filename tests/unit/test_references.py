"""What makes references quick changes nothing that they say; and the bound of logits holds against float64."""

from __future__ import annotations

import pytest
import torch

import vllm_weir as weir
from tests.support.measure import close_logits, logit_bound, rel_err
from tests.support.models import make_model
from tests.support.oracle import Oracle
from tests.support.remembered import REFERENCES, Remembered
from tests.support.steered import SteeredOracle, tokens

IDS = tokens(21)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def oracle(request: pytest.FixtureRequest) -> SteeredOracle:
    return SteeredOracle(make_model(request.param))


def test_greedy_with_a_cache_is_greedy_without(oracle: SteeredOracle) -> None:
    """Token by token from transformers' cache, also past a window of 16, and when more is asked for later."""
    first, made = oracle.greedy(IDS, 5), oracle.greedy(IDS, 12)
    assert made[:5] == first and made == oracle.logits(IDS + made[:-1])[len(IDS) - 1 :].argmax(-1).tolist()
    with torch.no_grad():
        cached = oracle.model(torch.tensor([IDS]), use_cache=True)
        last = oracle.model(torch.tensor([made[:1]]), past_key_values=cached.past_key_values, use_cache=True)
    plain = oracle.logits([*IDS, made[0]])
    assert close_logits(last.logits[0, -1], plain[-1], plain[-1])  # products of other shapes round otherwise


def test_a_guess_changes_no_token(oracle: SteeredOracle) -> None:
    v = 3 * torch.randn(oracle.hidden_size, generator=torch.Generator().manual_seed(1))
    for case in ([], [weir.Add(v, 1)], [weir.Add(v, 1, positions="generated")]):
        made = oracle.steered_greedy(IDS, 5, case)
        assert made == oracle.steered(IDS + made[:-1], len(IDS), case)[1][len(IDS) - 1 :].argmax(-1).tolist()
        for guess in (made, made[:3], [*made[:2], made[2] ^ 1, *made[3:]], [7] * 9):
            assert oracle.steered_greedy(IDS, 5, case, guess) == made
    assert oracle.steered_greedy(IDS, 5, []) == oracle.greedy(IDS, 5)


def test_what_is_remembered_is_what_is_computed(oracle: SteeredOracle) -> None:
    """Whichever sites are asked for first, of rows and under interventions; other interventions are others."""
    REFERENCES.clear()
    v = torch.randn(oracle.hidden_size, generator=torch.Generator().manual_seed(2))
    ends, parts, inside = [("resid_post", 1)], [("attn_out", 1)], [("z", 1)]
    few, more, most = (oracle.rows(IDS, sites) for sites in (ends, parts, inside))
    assert few.keys() < more.keys() < most.keys() == oracle.rows(IDS).keys()
    for site in few:
        assert torch.equal(few[site], most[site]), site
    for site in more:
        assert torch.equal(more[site], most[site]), site
    assert oracle.rows(IDS, ends)["z", 1] is most["z", 1], "what knows more serves who asks for less"
    REFERENCES.clear()
    cases = [[weir.Add(v, 1)], [weir.Add(v, 1, 2.0)], [weir.Add(v, 2)], [weir.Add(2 * v, 1)], []]
    narrow = [oracle.steered(IDS, 15, case, sites=ends) for case in cases]
    wide = [oracle.steered(IDS, 15, case) for case in cases]
    assert all(("z", 1) not in rows for rows, _ in narrow) and all(("z", 1) in rows for rows, _ in wide)
    for (rows, logits), (every, same) in zip(narrow, wide, strict=True):
        assert torch.equal(logits, same) and all(torch.equal(rows[site], every[site]) for site in rows)
    assert len({logits.sum().item() for _, logits in narrow}) == 4, "twice the vector is the vector twice"
    assert not torch.equal(oracle.steered(IDS, 10, [weir.Add(v, 1, positions="prompt")])[1], narrow[0][1])
    assert rel_err(wide[-1][0]["resid_post", 2], few["resid_post", 2]) == 0


def test_what_was_used_last_is_kept() -> None:
    kept = Remembered(3000)
    for name in "abc":
        kept.put(name, name.upper(), [torch.zeros(250)])
    assert kept.get("a") == "A" and kept.held == 3000
    kept.put("d", "D", [torch.zeros(1)])
    assert [kept.get(name) for name in "abcd"] == ["A", None, "C", "D"] and kept.held == 2004
    kept.put("d", "again", [torch.zeros(2)])
    assert kept.get("d") == "again" and kept.held == 2008
    kept.put("whole", 1, [torch.zeros(2000)])
    assert kept.get("whole") is None and kept.held == 0, "what is larger than all is not kept"


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_logits_round_within_their_bound(family: str) -> None:
    """Against float64: float32 is within a quarter of it, and what is wrong is not."""
    oracle = Oracle(make_model(family))
    narrow = oracle.logits(IDS)
    exact = oracle.model.double()(torch.tensor([IDS]), use_cache=False).logits[0].detach()
    assert exact.dtype == torch.float64 and close_logits(narrow, exact, exact)
    assert (narrow - exact).abs().max() <= logit_bound(exact) / 4
    difference = exact[-1, 7] - exact[-1, 11]
    assert close_logits(narrow[-1, 7] - narrow[-1, 11], difference, exact)
    assert not close_logits(difference + 2 * logit_bound(exact), difference, exact)
    assert not close_logits(float("nan"), difference, exact)
