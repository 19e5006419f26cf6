"""`LLM.beam_search`: the beams are those of the steered model, and each that is returned has its rows."""

from __future__ import annotations

import copy
from functools import cache
from itertools import pairwise

import pytest
import torch
from vllm.sampling_params import BeamSearchParams

import vllm_weir as weir
from tests.engine.common import assert_nothing_is_held, directory, oracle, sampling, tokens
from tests.support.check import expected_positions
from tests.support.measure import logit_bound, rel_err

pytestmark = pytest.mark.engine("default")
BOUND = 1e-5
WIDTH, G, BLOCK = 3, 6, 1
THOROUGH = pytest.mark.thorough
LENGTHS = (70, 5)


def vector(seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(128, generator=torch.Generator().manual_seed(seed))


def beams(**more) -> BeamSearchParams:
    return BeamSearchParams(**{"beam_width": WIDTH, "max_tokens": G, "ignore_eos": True} | more)


def given(lengths=LENGTHS):
    return [{"prompt_token_ids": tokens(n, i)} for i, n in enumerate(lengths)]


class Reference:
    """Beam search of vLLM's kind on the model in transformers, steered at chosen positions.

    No beam may win by less than rounding decides: another processor would find another one.
    """

    def __init__(self, truth, v=None, selector="all") -> None:
        self.truth, self.v, self.selector = truth, v, selector
        self.run = cache(self._run)  # searches of one prompt are repeated

    def _run(self, prompt_len: int, ids: tuple[int, ...]):
        """Rows at every point, and the logits of the next token."""
        if self.v is None:
            rows, logits = self.truth.points.points(ids)
        else:
            at = expected_positions(self.selector, prompt_len, len(ids) - prompt_len + 1, ids)
            rows, logits = self.truth.points.steer(ids, "resid_post", BLOCK, self.v, at)
        return rows, logits[-1].double()

    def logits(self, prompt_len: int, ids: list[int]) -> torch.Tensor:
        """Those of the next token alone."""
        if self.v is None:
            return self.truth.logits(ids)[-1].double()
        return self.run(prompt_len, tuple(ids))[1]

    def search(self, prompt: list[int]) -> list[list[int]]:
        alive = [(0.0, prompt)]
        for step in range(1, G + 1):
            found, bound = [], 0.0
            for total, ids in alive:
                logits = self.logits(len(prompt), ids)
                values, best = logits.log_softmax(-1).topk(2 * WIDTH)
                found += [(total + v, [*ids, t]) for v, t in zip(values.tolist(), best.tolist(), strict=True)]
                bound = max(bound, step * logit_bound(logits))  # of a sum of so many
            found.sort(reverse=True)
            gaps = [a - b for (a, _), (b, _) in pairwise(found[: WIDTH + 1])][0 if step == G else WIDTH - 1 :]
            assert min(gaps) > 2 * bound, f"too near a tie: {gaps}; choose other prompts"
            alive = found[:WIDTH]
        return [ids for _, ids in alive]


def check(outputs, reference: Reference, selectors=("all",)) -> None:
    for output, n in zip(outputs, LENGTHS, strict=True):
        prompt = tokens(n, LENGTHS.index(n))
        assert [beam.tokens for beam in output.sequences] == reference.search(prompt)
        for beam in output.sequences:
            rows, _ = reference.run(n, tuple(beam.tokens[:-1]))
            at = sorted({p for one in selectors for p in expected_positions(one, n, G, beam.tokens)})
            for site in beam.activations.sites:
                assert beam.activations.positions_of(*site).tolist() == at
                assert rel_err(beam.activations[site], rows[tuple(site)][at]) <= BOUND, site
            assert (beam.receipt.prompt_tokens, beam.receipt.generated_tokens) == (n, G)
            assert beam.receipt.complete


@pytest.mark.parametrize(
    "selector",
    ["sampled", *(pytest.param(s, marks=THOROUGH) for s in ("all", "generated", [-1, 3], {"not_token_ids": [7, 9]}))],
)
def test_rows(llm, root, selector):
    """Of every beam that is returned: P + G - 1 rows, at the positions that a plain request has."""
    asked = weir.params(beams(), capture=weir.Capture("resid_post", positions=selector))
    check(llm.beam_search(given(), asked), Reference(oracle(directory(root))), [selector])
    assert_nothing_is_held(llm)


@pytest.mark.parametrize(
    "selector", [[-1, 72, 7], *(pytest.param(s, marks=THOROUGH) for s in ("all", "generated", "prompt"))]
)
def test_steering(llm, root, selector):
    """Positions are those of the sequence, though each step sends it as a prompt; twice, with what is cached."""
    reference = Reference(oracle(directory(root)), vector(), selector)
    add = weir.Add(vector(), BLOCK, positions=selector)
    asked = weir.params(beams(), capture=weir.Capture("resid_post"), interventions=add)
    plain = [[beam.tokens for beam in output.sequences] for output in llm.beam_search(given(), beams())]
    for _ in range(2):
        outputs = llm.beam_search(given(), asked)
        check(outputs, reference)
        assert [[beam.tokens for beam in output.sequences] for output in outputs] != plain
        for output, n in zip(outputs, LENGTHS, strict=True):
            for beam in output.sequences:
                steered = expected_positions(selector, n, G, beam.tokens)
                (done,) = beam.receipt.steered
                assert done[weir.Site("resid_post", BLOCK)] + beam.receipt.shared[0] == len(steered)
    assert [[beam.tokens for beam in output.sequences] for output in llm.beam_search(given(), beams())] == plain
    del outputs, output, beam
    assert_nothing_is_held(llm)


def test_everything_else(llm, root):
    """Scores, gates, a lens, and what steers every request; a batch after that is plain."""
    truth = oracle(directory(root))
    probe = weir.Probe("p", vector(2), layer=0)
    fires = weir.When("p", above=0.0, delay=1)
    gated = weir.Add(vector(), BLOCK, positions="generated", when=fires)
    asked = weir.params(beams(), probes=probe, interventions=gated, capture=weir.Capture("resid_post", [0, BLOCK]))
    for output in llm.beam_search(given(), asked):
        for beam in output.sequences:
            rows = beam.activations["resid_post", 0].double()
            scores = rows @ vector(2).double()
            assert rel_err(beam.scores["p"][:, 0], scores) <= BOUND
            acted = [p for p in range(output.sequences[0].receipt.prompt_tokens, len(rows)) if scores[p - 1] > 0]
            reference, _ = truth.points.steer(beam.tokens[:-1], "resid_post", BLOCK, vector(), acted)
            assert rel_err(beam.activations["resid_post", BLOCK], reference["resid_post", BLOCK]) <= BOUND
            assert beam.receipt.gates[0]["fired"] == len(acted)
    (output,) = llm.beam_search(given((5,)), weir.params(beams(), lens=weir.Lens(layers=[3], top_k=1)))
    assert len(output.sequences[0].lens[3].token_ids) == 5 + G - 1
    weir.set_global(llm, [weir.Add(vector(), BLOCK, positions="generated")])
    try:
        steered = llm.beam_search(given(), beams())
    finally:
        weir.clear_global(llm)
    reference = Reference(truth, vector(), "generated")
    for output, prompt in zip(steered, given(), strict=True):
        assert [beam.tokens for beam in output.sequences] == reference.search(prompt["prompt_token_ids"])
        assert output.sequences[0].activations is None
    (output,) = llm.beam_search(given((5,)), beams())
    assert output.sequences[0].receipt is None and output.sequences[0].activations is None
    del output, steered, beam
    assert_nothing_is_held(llm)


def test_beams_that_end_early(llm, root):
    """An end of sequence is the last token, which never enters the model."""
    prompt = tokens(9)
    second = llm.generate({"prompt_token_ids": prompt}, sampling(3), use_tqdm=False)[0].outputs[0].token_ids[1]
    tokenizer = llm.get_tokenizer()
    before = tokenizer.eos_token
    tokenizer.eos_token = f"w{second}"
    try:
        asked = weir.params(beams(ignore_eos=False, beam_width=2), capture=weir.Capture("resid_post", 3))
        (output,) = llm.beam_search([{"prompt_token_ids": prompt}], asked)
    finally:
        tokenizer.eos_token = before
    assert any(beam.tokens[-1] == second for beam in output.sequences)
    for beam in output.sequences:
        rows = oracle(directory(root)).rows(beam.tokens[:-1])
        assert beam.receipt.generated_tokens == len(beam.tokens) - 9
        assert rel_err(beam.activations["resid_post", 3], rows["resid_post", 3]) <= BOUND
    del output, beam
    assert_nothing_is_held(llm)


def test_params():
    """They are vLLM's own with what is asked; copies keep it, and the caller's are as they were."""
    mine = beams(temperature=0.5)
    asked = weir.params(mine, capture=weir.Capture("resid_post"))
    more = weir.params(copy.deepcopy(asked), interventions=weir.Add(vector(), BLOCK))
    assert isinstance(asked, BeamSearchParams) and not hasattr(mine, "extra_args")
    assert (more.beam_width, more.max_tokens, more.temperature) == (WIDTH, G, 0.5)
    assert set(more.extra_args["weir"]) == {"v", "capture", "interventions"} and more.extra_args["weir"]["capture"]
    with pytest.raises(weir.WeirError, match="give SamplingParams, PoolingParams or BeamSearchParams"):
        weir.params(object(), capture=weir.Capture("resid_post"))


def test_refusals(llm):
    """What a search cannot do, before anything is computed; the engine goes on."""
    probe = weir.Probe("p", vector(2), layer=0)
    for asked, field in (
        ({"probes": probe, "stop_when": "p > 0.5"}, "stop_when"),
        ({"capture": weir.Capture("resid_post", 99)}, "capture[0].layers"),
        ({"interventions": weir.Add(vector(), BLOCK, positions=[200])}, "interventions[0].positions"),
        ({"interventions": weir.Add(vector(), BLOCK, when=weir.When("controller:x"))}, "interventions[0].when"),
    ):
        with pytest.raises(weir.WeirError) as e:
            llm.beam_search(given(), weir.params(beams(), **asked))
        assert e.value.field == field
    with pytest.raises(weir.WeirError, match="generated"):
        asked = weir.params(beams(max_tokens=1), interventions=weir.Add(vector(), BLOCK, positions="generated"))
        llm.beam_search(given(), asked)
    misspelt = weir.params(beams(), capture=weir.Capture("resid_post"))
    misspelt.extra_args = {"wier": misspelt.extra_args["weir"]}
    with pytest.raises(weir.WeirError, match="did you mean 'weir'"):
        llm.beam_search(given(), misspelt)
    assert len(llm.beam_search(given(), beams())) == len(LENGTHS)
    del e
    assert_nothing_is_held(llm)
