"""Edits of heads, neurons and rows inside attention and MLP, against transformers with the same edit."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import vllm_weir as weir
from tests.conformance.inside import INNER
from tests.engine.common import BOUND, assert_nothing_is_held, directory
from tests.support.check import expected_positions
from tests.support.engines import get_llm
from tests.support.measure import alike, rel_err
from tests.support.models import INNER_LACKS, INNER_MODELS
from tests.support.steered import SteeredOracle, check, chunks, prompt, sampling, tokens, truth, vectors

pytestmark = pytest.mark.engine
D_HEAD = {"qwen3": 64}
LENGTH = 26


class Case(NamedTuple):
    """A model, its engine and its reference under interventions."""

    family: str
    llm: Any
    truth: SteeredOracle

    @property
    def d_head(self) -> int:
        return D_HEAD.get(self.family, 32)

    @property
    def capture(self) -> list[weir.Capture]:
        """What lies inside the edited block and the next one, and every stream."""
        hooks = [hook for hook in INNER if hook not in INNER_LACKS[self.family]]
        inside = [weir.Capture(hook, [1, 2]) for hook in hooks]
        return [*inside, weir.Capture("resid_pre"), weir.Capture("resid_post")]


@pytest.fixture(scope="module", params=INNER_MODELS)
def case(request: pytest.FixtureRequest, root) -> Case:
    where = directory(root, request.param, INNER_MODELS[request.param])
    return Case(request.param, get_llm(where, block_size=32, max_num_seqs=16), truth(where))


def run(case: Case, interventions: list[Any], seed: int = 0, max_tokens: int = 5, **more: Any) -> Any:
    asked = weir.params(sampling(max_tokens, **more), capture=case.capture, interventions=interventions)
    (out,) = case.llm.generate([prompt(LENGTH, seed)], asked, use_tqdm=False)
    return out


def edits_of_heads(case: Case) -> dict[str, list[Any]]:
    v, d = vectors(3), case.d_head
    whole = 4 * d
    return {
        "add to a head": [weir.Add(v(d), 1, 2.0, hook="z", heads=[1])],
        "add to several": [weir.Add(v(d), 1, 2.0, hook="z", heads=[3, 0], positions="generated")],
        "a vector for each": [weir.Add(v(2, d), 1, hook="z", heads=[2, 0])],
        "add to every head": [weir.Add(v(4, d).reshape(whole), [1, 2], hook="z", positions="::2")],
        "as long as the head's own": [weir.Add(v(d), 1, 0.7, hook="z", heads=[1], norm_match=True)],
        "and no longer": [weir.Add(v(d), 1, 3.0, hook="z", heads=[1], keep_norm=True)],
        "ablate in a head": [weir.Ablate(v(d), 1, hook="z", heads=[2])],
        "ablate two directions": [weir.Ablate(v(2, d), 1, hook="z", heads=[2])],
        "silence a head": [weir.Replace(torch.zeros(d), 1, hook="z", heads=[0])],
        "replace half": [weir.Replace(v(d), 1, hook="z", heads=[3], alpha=0.5, positions="last_prompt")],
        "clamp in a head": [weir.Clamp(v(d), 1, hook="z", heads=[1], min=-0.1, max=0.1)],
        "two after each other": [
            weir.Add(v(d), 1, hook="z", heads=[1]),
            weir.Ablate(v(d), 1, hook="z", heads=[1]),
            weir.Add(v(whole), 1, 0.3, hook="z"),
        ],
        "queries": [weir.Add(v(d), 1, hook="q", heads=[2], positions="-5:")],
        "keys": [weir.Add(v(d), 1, hook="k", heads=[1], positions="::3")],
        "values": [weir.Replace(v(d), 1, hook="v", heads=[0], positions=[1, 4, -2])],
    }


def edits_of_rows(case: Case) -> dict[str, list[Any]]:
    v, d = vectors(5), case.truth.hidden_size
    found = {
        "what attention is given": [weir.Add(v(d), 1, 0.5, hook="attn_in", positions="::2")],
        "what the MLP is given": [weir.Ablate(v(d), 1, hook="mlp_in")],
        "both": [weir.Add(v(d), 1, 0.5, hook="mlp_in"), weir.Add(v(case.d_head), 2, hook="z", heads=[3])],
    }
    if case.family == "mixtral":
        # Far enough for every token to go to other experts.
        shift = torch.tensor([9.0, 0, 0, 0, 0, 0, 7.0, 0])
        return found | {"the router": [weir.Add(shift, 1, hook="router_logits", positions="::2")]}
    mlp = {"llama": 448, "gpt2": 512}.get(case.family, 192)
    return found | {
        "add to neurons": [weir.Add(v(3), 1, 2.0, hook="mlp_post", neurons=[170, 3, 191])],
        "silence neurons": [weir.Replace(torch.zeros(4), 1, hook="mlp_post", neurons=[5, 6, 7, 100])],
        "all neurons": [weir.Add(v(mlp), [1, 2], hook="mlp_post", positions="generated")],
        "ablate among neurons": [weir.Ablate(v(mlp), 1, hook="mlp_post")],
        "clamp among all": [weir.Clamp(v(mlp), 1, hook="mlp_post", value=0.3)],
    }


def test_edits(case):
    """Rows inside and after the block, and the greedy tokens, prompt and generated, whole and chunked."""
    for size in (None, 7):
        with chunks(case.llm, size):
            for name, interventions in (edits_of_heads(case) | edits_of_rows(case)).items():
                out = run(case, interventions, seed=len(name))
                try:
                    check(out, interventions, case.truth, BOUND)
                except AssertionError as e:
                    raise AssertionError(f"{name}, steps of {size}: {e}") from e
                del out
    assert_nothing_is_held(case.llm)


def test_edits_move_what_follows(case):
    """Else the test before would see no error."""
    for name, interventions in (edits_of_heads(case) | edits_of_rows(case)).items():
        ids = tokens(LENGTH, 1)
        plain = case.truth.steered(ids, LENGTH - 4, [])[1]
        assert rel_err(case.truth.steered(ids, LENGTH - 4, interventions)[1], plain) > 1e-3, name


def test_only_that_head_changes(case):
    """At the point itself the other heads are as before, and nothing before it is."""
    v = vectors(7)(case.d_head)
    plain = run(case, [], max_tokens=1).activations
    acts = run(case, [weir.Add(v, 1, 2.0, hook="z", heads=[1])], max_tokens=1).activations
    assert torch.equal(acts["z", 1][:, [0, 2, 3]], plain["z", 1][:, [0, 2, 3]])
    assert rel_err(acts["z", 1][:, 1] - plain["z", 1][:, 1], (2 * v).expand(LENGTH, -1)) <= BOUND
    for hook in ("resid_pre", "attn_in", "q", "k", "v", "q_rot", "k_rot", "pattern"):
        assert torch.equal(acts[hook, 1], plain[hook, 1]), hook
    assert not torch.equal(acts["resid_post", 1], plain["resid_post", 1])


def test_before_the_edit(case):
    edit = weir.Replace(torch.zeros(case.d_head), 1, hook="z", heads=[2])
    before, after = (
        case.llm.generate(
            [prompt(LENGTH)],
            weir.params(sampling(1), capture=weir.Capture("z", 1, before=before), interventions=edit),
            use_tqdm=False,
        )[0].activations["z", 1]
        for before in (True, False)
    )
    assert torch.equal(before, run(case, [], max_tokens=1).activations["z", 1])
    assert not after[:, 2].any() and torch.equal(after[:, :2], before[:, :2])


def test_different_edits_in_one_batch(case):
    """Every request gets its own, and those beside them are the same to the bit."""
    edits = edits_of_heads(case) | edits_of_rows(case)
    names = [*list(edits)[:7], None, *list(edits)[-4:], None]
    plain = sampling(5, logprobs=3)
    asked = [weir.params(plain, capture=case.capture, interventions=edits[n]) if n else plain for n in names]
    texts = [prompt(LENGTH + k, k) for k in range(len(names))]
    stock = case.llm.generate(texts, plain, use_tqdm=False)
    outs = case.llm.generate(texts, asked, use_tqdm=False)
    for name, before, out in zip(names, stock, outs, strict=True):
        if name:
            check(out, edits[name], case.truth, BOUND)
            continue
        assert out.outputs[0].token_ids == before.outputs[0].token_ids
        if case.family != "mixtral":  # experts sum what the whole batch sends them in one product, in stock vLLM too
            was, now = ([{t: p.logprob for t, p in s.items()} for s in o.outputs[0].logprobs] for o in (before, out))
            assert alike(now, was)


def test_cached_prompts_of_edits(case):
    """A prompt computed under an edit is shared by requests with the same edit and by no others."""
    edit = [weir.Add(vectors(9)(case.d_head), 1, 2.0, hook="z", heads=[1])]
    other = [weir.Add(vectors(9)(case.d_head), 1, 2.0, hook="z", heads=[2])]
    text = {"prompt_token_ids": tokens(75, 55)}
    capture = weir.Capture("resid_post", positions="sampled")
    for interventions, cached in ((edit, False), (edit, True), (other, False), ([], False), (other, True)):
        asked = weir.params(sampling(4), capture=capture, interventions=interventions)
        (out,) = case.llm.generate([text], asked, use_tqdm=False)
        assert (out.receipt.cached_tokens > 0) == cached, (interventions, out.receipt)
        check(out, interventions, case.truth, BOUND)


def test_receipts_count_edits(case):
    edit = [weir.Add(vectors(1)(case.d_head), [1, 2], hook="z", heads=[1], positions="3:20:2")]
    out = run(case, edit)
    at = expected_positions("3:20:2", LENGTH, 5)
    assert [{tuple(site): n for site, n in one.items()} for one in out.receipt.steered] == [
        {("z", 1): len(at), ("z", 2): len(at)}
    ]


def test_refused_edits(case):
    v, d, mlp = vectors(2), case.d_head, {"llama": 448, "gpt2": 512}.get(case.family, 192)
    read_only = ("q_rot", "k_rot", "attn_scores", "pattern", "mlp_pre", "mlp_pre_linear", "expert_ids")
    refused = [(lambda hook=hook: weir.Add(v(d), 1, hook=hook), "hook") for hook in read_only]
    refused += [
        (lambda: weir.Add(v(case.truth.hidden_size), 1, hook="resid_post", heads=[0]), "heads"),
        (lambda: weir.Add(v(d), 1, hook="z", heads=[4]), "heads"),
        (lambda: weir.Add(v(d), 1, hook="z", heads=[1, 1]), "heads"),
        (lambda: weir.Add(v(d), 1, hook="z", heads=[]), "heads"),
        (lambda: weir.Add(v(d + 1), 1, hook="z", heads=[0]), "vector"),
        (lambda: weir.Add(v(d), 1, hook="z"), "vector"),
        (lambda: weir.Add(v(d), 1, hook="z", neurons=[0]), "neurons"),
    ]
    if "mlp_post" in INNER_LACKS[case.family]:
        refused.append((lambda: weir.Add(v(mlp), 1, hook="mlp_post"), "hook"))
    else:
        refused.append((lambda: weir.Add(v(1), 1, hook="mlp_post", neurons=[mlp]), "neurons"))
        refused.append((lambda: weir.Add(v(3), 1, hook="mlp_post", neurons=[0, 1]), "vector"))
    for make, field in refused:
        with pytest.raises(weir.WeirError) as e:
            run(case, [make()])
        assert e.value.field.split(".")[-1] == field, (field, str(e.value))
    check(run(case, []), [], case.truth, BOUND)
