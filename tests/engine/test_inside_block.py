"""Rows inside attention and MLP, and edits of heads, neurons and rows there, on engines as they are used, against
transformers in fp32; one engine start a family."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import vllm_weir as weir
from tests.conformance.inside import INNER
from tests.engine.common import BOUND, assert_nothing_is_held, directory, ids_of, prompts, sampling, tokens, verify
from tests.support.check import expected_positions
from tests.support.engines import get_llm
from tests.support.measure import alike, close_products, rel_err
from tests.support.models import INNER_LACKS, INNER_MODELS, NO_NEURONS
from tests.support.references import reference
from tests.support.steered import SteeredOracle, check, chunks, prompt, same_answers, vectors

pytestmark = pytest.mark.engine
HEADS = dict.fromkeys(INNER_MODELS, (4, 2, 32)) | {"qwen3": (4, 2, 64), "gpt2": (4, 4, 32)}
"""Family -> heads, key-value heads, and what a head has of a row."""
NEURONS = {"llama": 448, "gemma2": 192, "qwen3": 192, "gpt2": 512}
LENGTHS = (40, 21, 9, 1, 30)
LENGTH = 26
"""Of the prompts whose rows are edited."""


class Case(NamedTuple):
    """A model, its engine, its reference and the points that it has inside its blocks."""

    family: str
    llm: Any
    truth: SteeredOracle
    hooks: tuple[str, ...]

    @property
    def layers(self) -> int:
        return self.truth.num_layers

    @property
    def d_head(self) -> int:
        return HEADS[self.family][2]

    def everything(self, positions: Any = "all") -> list[weir.Capture]:
        return [weir.Capture(hook, positions=positions) for hook in (*self.hooks, "resid_post")]

    def wanted(self, positions: Any = "all") -> dict[tuple[str, int], list[Any]]:
        hooks = (*self.hooks, "resid_post")
        return {(hook, layer): [positions] for hook in hooks for layer in range(self.layers)}

    @property
    def around(self) -> list[weir.Capture]:
        """What lies inside the edited block and the next one, and every stream."""
        inside = [weir.Capture(hook, [1, 2]) for hook in self.hooks]
        return [*inside, weir.Capture("resid_pre"), weir.Capture("resid_post")]

    def rows(self, out: Any) -> dict[tuple[str, int], torch.Tensor]:
        """What transformers computes of an output."""
        return self.truth.rows(ids_of(out)[:-1])


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.thorough if name == "qwen3" else ()) for name in INNER_MODELS],
)
def case(request: pytest.FixtureRequest, root) -> Case:
    where = directory(root, request.param, INNER_MODELS[request.param])
    hooks = tuple(hook for hook in INNER if hook not in INNER_LACKS[request.param])
    return Case(request.param, get_llm(where, block_size=32, max_num_seqs=16), reference(where), hooks)


def run(case: Case, asked: Any, lengths: Any = LENGTHS) -> list[Any]:
    return case.llm.generate(prompts(lengths), asked, use_tqdm=False)


def one(case: Case, *captures: weir.Capture, length: int = 12, max_tokens: int = 4) -> Any:
    (out,) = run(case, weir.params(sampling(max_tokens), capture=list(captures)), [length])
    return out


def test_sites(case):
    verdicts = {(v.hook, v.layer): v for v in weir.sites(case.llm)}
    for layer in range(case.layers):
        for hook in INNER:
            verdict = verdicts[hook, layer]
            assert verdict.supported == (hook in case.hooks) == (not verdict.reason), verdict
    for hook in sorted(INNER_LACKS[case.family]):
        with pytest.raises(weir.WeirError) as e:
            one(case, weir.Capture(hook, 0))
        assert e.value.field == "capture[0].hook"


@pytest.mark.parametrize("size", [None, 7])
def test_rows(case, size):
    """Prompt and generated tokens, every point of every block, whole and chunked prompts, beside plain requests."""
    plain, reading = sampling(6, logprobs=5), weir.params(sampling(6, logprobs=5), capture=case.everything())
    with chunks(case.llm, size):
        case.llm.reset_prefix_cache()
        alone = run(case, plain)
        case.llm.reset_prefix_cache()
        outs = run(case, [reading, plain, reading, plain, reading])
    for out in outs[::2]:
        verify(out, case.wanted(), case.truth)
        theirs, generated = case.rows(out), len(out.prompt_token_ids)
        for site in case.wanted():
            error = rel_err(out.activations[site][generated:], theirs[site][generated:])
            assert error <= BOUND, (site, "generated tokens alone")
    assert all(out.activations is None for out in outs[1::2])
    assert same_answers(outs, alone)
    del outs, out
    assert_nothing_is_held(case.llm)


def test_shapes_and_what_the_points_are_to_each_other(case):
    """The engine's own rows obey the definitions, whatever the reference says."""
    acts, n = one(case, *case.everything(), length=30).activations, 33
    heads, kv_heads, d_head = HEADS[case.family]
    shapes = dict.fromkeys(("q", "q_rot", "z"), (heads, d_head)) | dict.fromkeys(
        ("k", "v", "k_rot"), (kv_heads, d_head)
    )
    shapes |= dict.fromkeys(("pattern", "attn_scores"), (heads, n))
    shapes |= dict.fromkeys(("attn_in", "mlp_in"), (case.truth.hidden_size,))
    shapes |= dict.fromkeys(NO_NEURONS & set(case.hooks), (NEURONS.get(case.family),))
    if case.family == "mixtral":
        shapes |= {"router_logits": (8,), "expert_ids": (2,), "expert_weights": (2,)}
    assert shapes.keys() == set(case.hooks)
    for layer in range(case.layers):
        for hook, shape in shapes.items():
            assert acts[hook, layer].shape == (n, *shape), hook
        pattern, v, z = (acts[hook, layer] for hook in ("pattern", "v", "z"))
        assert rel_err(pattern.sum(-1), torch.ones(pattern.shape[:2])) <= BOUND
        assert rel_err(acts["attn_scores", layer].softmax(-1), pattern) <= BOUND
        v = v.repeat_interleave(z.shape[1] // v.shape[1], 1)
        assert rel_err(torch.einsum("qhk,khd->qhd", pattern, v), z) <= BOUND
        if case.family == "mixtral":
            best = acts["router_logits", layer].float().softmax(-1).topk(2)
            assert torch.equal(best.indices, acts["expert_ids", layer].long())
            weights = best.values / best.values.sum(-1, keepdim=True)
            assert rel_err(weights, acts["expert_weights", layer]) <= BOUND


@pytest.mark.parametrize("size", [None, 7])
def test_vllm_lens_s_output_qk(case, size):
    """Queries and keys of all blocks, and patterns from them; beside a plain request, whose answer stays."""
    heads, kv_heads, d_head = HEADS[case.family]
    extra = {"output_qk": True, "output_residual_stream": [1]}
    plain = sampling(5, logprobs=5)
    with chunks(case.llm, size):
        alone = run(case, plain, [30, 21])
        out, other = run(case, [sampling(5, logprobs=5, extra_args=extra), plain], [30, 21])
    acts, theirs, n = out.activations, case.rows(out), 34
    assert acts["attn_q"].shape == (case.layers, n, heads, d_head)
    assert acts["attn_k"].shape == (case.layers, n, kv_heads, d_head)
    assert acts["qk_layers"] == list(range(case.layers)) and acts["residual_stream"].shape[:2] == (1, n)
    for layer, meta in enumerate(acts["qk_meta"]):
        for name, hook in (("attn_q", "q_rot"), ("attn_k", "k_rot")):
            assert rel_err(acts[name][layer], theirs[hook, layer]) <= 1e-5, (hook, layer)
            assert rel_err(acts[name][layer, 30:], theirs[hook, layer][30:]) <= 1e-5, (hook, layer, "generated")
        pattern = theirs["pattern", layer].transpose(0, 1)
        assert (weir.attention_patterns(acts, layer) - pattern).abs().max() <= 1e-5, layer
        assert (meta["num_heads_local"], meta["num_kv_heads_local"], meta["head_size"]) == (heads, kv_heads, d_head)
        assert f".{layer}." in meta["layer_name"]
    assert same_answers([out, other], alone)
    del acts, out, other
    assert_nothing_is_held(case.llm)


def test_patterns_of_chosen_queries(case):
    """Rows of the chosen positions, with keys up to the last of them, in whole and chunked prompts."""
    selectors = ["last_prompt", "generated", [0, -1, 5], "2:30:3"]
    asked = [
        weir.params(sampling(4), capture=[weir.Capture(h, [0, 1], at) for h in ("pattern", "attn_scores", "z")])
        for at in selectors
    ]
    for size in (None, 8):
        with chunks(case.llm, size):
            outs = run(case, asked, [24] * len(asked))
        for out in outs:
            theirs = case.rows(out)
            for site in out.activations.sites:
                at = out.activations.positions_of(*site)
                expected = theirs[tuple(site)][at]
                if site.hook != "z":
                    expected = expected[..., : int(at[-1]) + 1]
                assert rel_err(out.activations[site], expected) <= BOUND, (site, size)
                assert out.receipt.captured[site] == len(at)


def test_prefix_cache(case):
    """A later request of a prompt has its rows; only those that need earlier positions compute them again."""
    text = {"prompt_token_ids": tokens(80, 77)}
    for captures, hits in (
        ([], None),
        ([weir.Capture("z", positions="sampled")], True),
        ([weir.Capture("pattern", positions="last_prompt")], None),
        (case.everything(), False),
    ):
        asked = weir.params(sampling(4), capture=captures) if captures else sampling(4)
        (out,) = case.llm.generate([text], asked, use_tqdm=False)
        if hits is not None:
            assert (out.receipt.cached_tokens > 0) == hits
        if not captures:
            continue
        theirs = case.rows(out)
        for site in out.activations.sites:
            at = out.activations.positions_of(*site)
            expected = theirs[tuple(site)][at]
            if site.hook in ("pattern", "attn_scores"):
                expected = expected[..., : int(at[-1]) + 1]
            assert rel_err(out.activations[site], expected) <= BOUND, site


def test_picked_heads_and_neurons(case):
    """In the order asked, of what is stored per head or per neuron."""
    picked = [weir.Capture(hook, 1, heads=[3, 1]) for hook in ("q", "q_rot", "z", "pattern", "attn_scores")]
    picked += [weir.Capture(hook, [0, 1], heads=[1]) for hook in ("k", "v", "k_rot")]
    neurons = [170, 3, 191]
    picked += [weir.Capture(hook, 1, neurons=neurons) for hook in ("mlp_pre", "mlp_post") if hook in case.hooks]
    out = one(case, *picked)
    theirs = case.rows(out)
    for site in out.activations.sites:
        rows = theirs[tuple(site)]
        if site.hook.startswith("mlp"):
            expected = rows[:, neurons]
        else:
            expected = rows[:, [1]] if site.hook[0] in "kv" else rows[:, [3, 1]]
        assert rel_err(out.activations[site], expected) <= BOUND, site
    whole = one(case, weir.Capture("z", 1)).activations["z", 1]
    assert alike(out.activations["z", 1], whole[:, [3, 1]])


def test_reductions_and_products_with_directions(case):
    """One row a site, also where a row is wider or narrower than the stream; scores of whole rows."""
    hooks = [hook for hook in ("z", "k", "mlp_post", "mlp_in") if hook in case.hooks]
    ways = {"last": lambda x: x[-1:], "mean": lambda x: x.mean(0, keepdim=True), "max": lambda x: x.amax(0, True)}
    widths = {"z": HEADS[case.family][0] * case.d_head, "mlp_in": case.truth.hidden_size}
    widths |= {"mlp_post": NEURONS[case.family]} if case.family in NEURONS else {}
    directions = {hook: vectors(0)(3, width) for hook, width in widths.items()}
    wishes = [[weir.Capture(hook, reduce=how) for hook in hooks] for how in ways]
    wishes.append([weir.Capture(hook, 1, project=those) for hook, those in directions.items()])
    for size in (None, 7):
        with chunks(case.llm, size):
            asked = [weir.params(sampling(4), capture=captures) for captures in wishes]
            *reduced, scored = run(case, asked, [25] * len(wishes))
        for by_hand, out in zip(ways.values(), reduced, strict=True):
            theirs = case.rows(out)
            for site in out.activations.sites:
                rows = theirs[tuple(site)]
                assert out.activations[site].shape == (1, *rows.shape[1:])
                error = (out.activations[site].double() - by_hand(rows.double())).abs().max() / rows.abs().max()
                assert error <= BOUND, (site, size)
                assert out.receipt.captured[site] == 1
        theirs = case.rows(scored)
        for hook, those in directions.items():
            assert close_products(scored.activations[hook, 1], theirs[hook, 1].flatten(1), those), hook


def refused(case: Case, asked: str, make: Any, field: str) -> None:
    with pytest.raises(weir.WeirError) as e:
        run(case, weir.params(sampling(2), **{asked: [make()]}), [9])
    assert e.value.field.split(".")[-1] == field, (field, str(e.value))


def test_refused_captures(case):
    wrong = [
        (lambda: weir.Capture("resid_post", 0, heads=[0]), "heads"),
        (lambda: weir.Capture("attn_in", 0, heads=[0]), "heads"),
        (lambda: weir.Capture("z", 0, neurons=[0]), "neurons"),
        (lambda: weir.Capture("z", 0, heads=[4]), "heads"),
        (lambda: weir.Capture("z", 0, heads=[-1]), "heads"),
        (lambda: weir.Capture("k", 0, heads=[HEADS[case.family][1]]), "heads"),
    ]
    if case.family in NEURONS:
        wrong += [
            (lambda: weir.Capture("mlp_post", 0, neurons=[NEURONS[case.family]]), "neurons"),
            (lambda: weir.Capture("mlp_post", 0, heads=[0]), "heads"),
            (lambda: weir.Capture("mlp_post", 0, compress="rp8"), "compress"),
        ]
    else:
        wrong += [
            (lambda: weir.Capture("router_logits", 0, heads=[0]), "heads"),
            (lambda: weir.Capture("k", 0, compress="full8"), "compress"),
        ]
    for make, field in wrong:
        refused(case, "capture", make, field)
    verify(one(case, weir.Capture("z")), {("z", layer): ["all"] for layer in range(case.layers)}, case.truth)


def edit(case: Case, interventions: list[Any], max_tokens: int = 5, capture: Any = None) -> Any:
    asked = weir.params(sampling(max_tokens), capture=capture or case.around, interventions=interventions)
    (out,) = case.llm.generate([prompt(LENGTH)], asked, use_tqdm=False)
    return out


def edits(case: Case) -> dict[str, list[Any]]:
    """Of heads, then of whole rows and of neurons."""
    v, d = vectors(3), case.d_head
    whole, width = 4 * d, case.truth.hidden_size
    found = {
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
        "what attention is given": [weir.Add(v(width), 1, 0.5, hook="attn_in", positions="::2")],
        "what the MLP is given": [weir.Ablate(v(width), 1, hook="mlp_in")],
        "both": [weir.Add(v(width), 1, 0.5, hook="mlp_in"), weir.Add(v(d), 2, hook="z", heads=[3])],
    }
    if case.family == "mixtral":
        # Far enough for every token to go to other experts.
        shift = torch.tensor([9.0, 0, 0, 0, 0, 0, 7.0, 0])
        return found | {"the router": [weir.Add(shift, 1, hook="router_logits", positions="::2")]}
    mlp = NEURONS[case.family]
    return found | {
        "add to neurons": [weir.Add(v(3), 1, 2.0, hook="mlp_post", neurons=[170, 3, 191])],
        "silence neurons": [weir.Replace(torch.zeros(4), 1, hook="mlp_post", neurons=[5, 6, 7, 100])],
        "all neurons": [weir.Add(v(mlp), [1, 2], hook="mlp_post", positions="generated")],
        "ablate among neurons": [weir.Ablate(v(mlp), 1, hook="mlp_post")],
        "clamp among all": [weir.Clamp(v(mlp), 1, hook="mlp_post", value=0.3)],
    }


def test_edits_of_a_batch(case):
    """Every request gets its own: rows inside and after the block, and the greedy tokens, prompt and generated, whole
    and chunked. Those beside them are the same to the bit."""
    made = edits(case)
    names = [*list(made)[:9], None, *list(made)[9:], None]
    plain = sampling(5, logprobs=3)
    asked = [weir.params(plain, capture=case.around, interventions=made[n]) if n else plain for n in names]
    texts = [prompt(LENGTH + k % 7, k) for k in range(len(names))]
    for size in (None, 7):
        with chunks(case.llm, size):
            case.llm.reset_prefix_cache()
            stock = case.llm.generate(texts, plain, use_tqdm=False)
            case.llm.reset_prefix_cache()
            outs = case.llm.generate(texts, asked, use_tqdm=False)
        for name, before, out in zip(names, stock, outs, strict=True):
            if name:
                try:
                    check(out, made[name], case.truth, BOUND)
                except AssertionError as e:
                    raise AssertionError(f"{name}, steps of {size}: {e}") from e
            elif case.family == "mixtral":  # experts sum what the whole batch sends them in one product, in vLLM too
                assert out.outputs[0].token_ids == before.outputs[0].token_ids
            else:
                assert same_answers([out], [before])
    del outs, out
    assert_nothing_is_held(case.llm)


def test_edits_move_what_follows(case):
    """Else the test before would see no error."""
    ids = tokens(LENGTH, 1)
    plain = case.truth.steered(ids, LENGTH - 4, [], sites=())[1]
    for name, interventions in edits(case).items():
        assert rel_err(case.truth.steered(ids, LENGTH - 4, interventions, sites=())[1], plain) > 1e-3, name


def test_only_that_head_changes(case):
    """At the point itself the other heads are as before, and nothing before it is."""
    v = vectors(7)(case.d_head)
    changed = [weir.Add(v, 1, 2.0, hook="z", heads=[1])]
    plain, acts = (edit(case, one, 1).activations for one in ([], changed))
    assert alike(acts["z", 1][:, [0, 2, 3]], plain["z", 1][:, [0, 2, 3]])
    assert rel_err(acts["z", 1][:, 1] - plain["z", 1][:, 1], (2 * v).expand(LENGTH, -1)) <= BOUND
    for hook in ("resid_pre", "attn_in", "q", "k", "v", "q_rot", "k_rot", "pattern"):
        assert alike(acts[hook, 1], plain[hook, 1]), hook
    assert not torch.equal(acts["resid_post", 1], plain["resid_post", 1])
    silent = [weir.Replace(torch.zeros(case.d_head), 1, hook="z", heads=[2])]
    before, after = (
        edit(case, silent, 1, weir.Capture("z", 1, before=first)).activations["z", 1] for first in (True, False)
    )
    assert alike(before, plain["z", 1])
    assert not after[:, 2].any() and alike(after[:, :2], before[:, :2])


def test_cached_prompts_of_edits(case):
    """A prompt computed under an edit is shared by requests with the same edit and by no others."""
    one_head, other = ([weir.Add(vectors(9)(case.d_head), 1, 2.0, hook="z", heads=[k])] for k in (1, 2))
    text = {"prompt_token_ids": tokens(75, 55)}
    capture = weir.Capture("resid_post", positions="sampled")
    for interventions, cached in ((one_head, False), (one_head, True), (other, False), ([], False), (other, True)):
        asked = weir.params(sampling(4), capture=capture, interventions=interventions)
        (out,) = case.llm.generate([text], asked, use_tqdm=False)
        assert (out.receipt.cached_tokens > 0) == cached, (interventions, out.receipt)
        check(out, interventions, case.truth, BOUND)
    counted = [weir.Add(vectors(1)(case.d_head), [1, 2], hook="z", heads=[1], positions="3:20:2")]
    n = len(expected_positions("3:20:2", LENGTH, 5))
    steered = [{tuple(site): k for site, k in sites.items()} for sites in edit(case, counted).receipt.steered]
    assert steered == [{("z", 1): n, ("z", 2): n}]


def test_refused_edits(case):
    v, d, mlp = vectors(2), case.d_head, NEURONS.get(case.family, 192)
    read_only = ("q_rot", "k_rot", "attn_scores", "pattern", "mlp_pre", "mlp_pre_linear", "expert_ids")
    wrong = [(lambda hook=hook: weir.Add(v(d), 1, hook=hook), "hook") for hook in read_only]
    wrong += [
        (lambda: weir.Add(v(case.truth.hidden_size), 1, hook="resid_post", heads=[0]), "heads"),
        (lambda: weir.Add(v(d), 1, hook="z", heads=[4]), "heads"),
        (lambda: weir.Add(v(d), 1, hook="z", heads=[1, 1]), "heads"),
        (lambda: weir.Add(v(d), 1, hook="z", heads=[]), "heads"),
        (lambda: weir.Add(v(d + 1), 1, hook="z", heads=[0]), "vector"),
        (lambda: weir.Add(v(d), 1, hook="z"), "vector"),
        (lambda: weir.Add(v(d), 1, hook="z", neurons=[0]), "neurons"),
    ]
    if "mlp_post" in INNER_LACKS[case.family]:
        wrong.append((lambda: weir.Add(v(mlp), 1, hook="mlp_post"), "hook"))
    else:
        wrong.append((lambda: weir.Add(v(1), 1, hook="mlp_post", neurons=[mlp]), "neurons"))
        wrong.append((lambda: weir.Add(v(3), 1, hook="mlp_post", neurons=[0, 1]), "vector"))
    for make, field in wrong:
        refused(case, "interventions", make, field)
    check(edit(case, []), [], case.truth, BOUND)
