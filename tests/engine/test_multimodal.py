"""Prompts with images on tiny models of the common architectures, against transformers: rows at every position."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

import vllm_weir as weir
from tests.conformance.checks import middle, served, steerable, vector_for
from tests.conformance.multimodal.build import build
from tests.conformance.multimodal.check import MUTUAL, Prompt, Reference, captures, picture, prompts, rows_error
from tests.conformance.multimodal.recipes import RECIPES
from tests.engine.common import assert_nothing_is_held, sampling, scheduler
from tests.support.engines import close_all, get_llm
from tests.support.machine import model_class, module, needs, on_cpu

pytestmark = [pytest.mark.engine, needs(module("torchvision"))]
BOUND = 1e-5
G = 5
LLAVA, GEMMA3, QWEN2_5, QWEN3, MISTRAL3 = ARCHITECTURES = [
    f"{name}ForConditionalGeneration" for name in ("Llava", "Gemma3", "Qwen2_5_VL", "Qwen3VL", "Mistral3")
]
ADDED_BETWEEN = {QWEN3: {("resid_pre", 1), ("resid_pre", 2)}}
"""Where a model adds features of images to the stream between two blocks."""


@pytest.fixture(
    params=[
        pytest.param(name, marks=[needs(model_class(name)), *([] if name == MISTRAL3 else [pytest.mark.thorough])])
        for name in ARCHITECTURES
    ],
    scope="module",
)
def architecture(request):
    return request.param


@pytest.fixture(scope="module")
def usual():
    """The model of what one has to show: the quickest that this vLLM can import."""
    return next(name for name in (MISTRAL3, QWEN2_5) if model_class(name)() is None)


@pytest.fixture(scope="module", autouse=True)
def let_go():
    yield
    reference.cache_clear()
    close_all()


@lru_cache(maxsize=2)
def reference(root, architecture):
    where = root / architecture
    if not (where / "config.json").exists():
        build(RECIPES[architecture], where)
    return Reference(RECIPES[architecture], where, on_cpu())


def engine(root, architecture, **more):
    """Prompts are split into parts of 16 tokens, images too."""
    reference(root, architecture)
    more = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 32} | more
    return get_llm(root / architecture, limit_mm_per_prompt={"image": 3}, skip_mm_profiling=True, **more)


def sites_of(llm, architecture, media=True):
    """The sites that are served, to a prompt with images."""
    hidden = MUTUAL if media and RECIPES[architecture].mutual else ()
    return [site for site in served(weir.sites(llm)) if site[0] not in hidden]


def generate(llm, asked):
    """Generate for (prompt, keywords of `weir.params` or None)."""
    params = [sampling(G) if keys is None else weir.params(sampling(G), **keys) for _, keys in asked]
    return llm.generate([prompt.for_vllm for prompt, _ in asked], params, use_tqdm=False)


def test_every_point_of_the_language_model_and_none_of_the_tower(root, architecture):
    llm, truth = engine(root, architecture), reference(root, architecture).oracle
    sites = {(site.hook, site.layer): site for site in weir.sites(llm)}
    assert {layer for _, layer in sites} == set(range(truth.num_layers))
    refused = {at for at, site in sites.items() if not site.supported and "expert" not in site.hook}
    between = ADDED_BETWEEN.get(architecture, set())
    assert refused == between | {("router_logits", layer) for layer in range(truth.num_layers)}
    assert all("changes the stream" in sites[at].reason for at in between)


def test_rows(root, architecture):
    """A crowd of text and images, in parts, some sampled twice; then again, from the caches."""
    llm, truth = engine(root, architecture), reference(root, architecture)
    text, one, two = prompts(truth.recipe)
    for _ in range(2):
        asked = [(p, {"capture": captures(sites_of(llm, architecture, bool(p.items)))}) for p in (one, text, two)]
        outs = generate(llm, [*asked, (one, None)])
        assert outs[3].activations is None and outs[3].outputs[0].token_ids == outs[0].outputs[0].token_ids
        for out, (prompt, _) in zip(outs, asked):
            assert list(out.prompt_token_ids) == truth.ids(prompt)
            completion = out.outputs[0]
            assert rows_error(completion, truth.rows(prompt, completion.token_ids)) <= BOUND
            assert completion.receipt.prompt_tokens == len(out.prompt_token_ids)
    keys = {"capture": captures(sites_of(llm, architecture))}
    params = weir.params(sampling(G, n=2, temperature=1.0), **keys)
    (out,) = llm.generate([two.for_vllm], params, use_tqdm=False)
    for completion in out.outputs:
        assert rows_error(completion, truth.rows(two, completion.token_ids)) <= BOUND
    del outs, out, completion
    assert_nothing_is_held(llm)


def test_a_modality_selects_what_holds_embeddings_of_images(root, architecture):
    """Captured there alone, and added there, at every point; neighbours stay what they are."""
    llm, truth = engine(root, architecture), reference(root, architecture)
    text, one, two = prompts(truth.recipe)
    good = sites_of(llm, architecture)
    images = {"modality": "image"}
    at = truth.media_positions(two)
    assert 0 < len(at) < len(truth.ids(two)) and at != list(range(at[0], at[-1] + 1))
    out, plain, _ = generate(llm, [(two, {"capture": captures(good, images)}), (text, None), (one, None)])
    rows = truth.rows(two, out.outputs[0].token_ids)
    assert rows_error(out.outputs[0], rows, at) <= BOUND
    for seed, hook in enumerate(dict.fromkeys(hook for hook, _ in good)):
        site = middle(good, hook)
        if not steerable(hook) or (architecture != LLAVA and hook not in ("embed", "z", "resid_post")):
            continue
        vector = vector_for(rows[site], seed)
        add = weir.Add(vector, layers=site[1], hook=hook, positions=images)
        keys = {"capture": captures(good), "interventions": add}
        out, beside = generate(llm, [(two, keys), (text, None)])
        assert beside.outputs[0].token_ids == plain.outputs[0].token_ids
        steered = truth.rows(two, out.outputs[0].token_ids, (*site, vector, at))
        assert rows_error(out.outputs[0], steered) <= BOUND, site
        assert not torch.allclose(steered["final_norm", 0][at], rows["final_norm", 0][at], atol=0.1), "it moves nothing"


@needs(model_class(GEMMA3))
@pytest.mark.thorough
def test_an_image_whose_tokens_see_each_other_is_computed_in_one_step(root, monkeypatch):
    """Also beside captures for which a step may hold fewer tokens than it has positions; then it waits for them."""
    llm = engine(root, GEMMA3, additional_config={"weir": {"buffer_bytes": 1 << 16}})  # 128 rows
    truth, sites = reference(root, GEMMA3), sites_of(llm, GEMMA3)
    text, one, two = prompts(truth.recipe)
    core, steps = scheduler(llm), []
    schedule = core.schedule

    def noted(*args, **more):
        before = {name: request.num_computed_tokens for name, request in core.requests.items()}
        out = schedule(*args, **more)
        for name, count in out.num_scheduled_tokens.items():
            for feature in core.requests[name].mm_features:
                first, length = feature.mm_position.offset, feature.mm_position.length
                steps.append((before[name], before[name] + count, first, first + length))
        return out

    monkeypatch.setattr(core, "schedule", noted)
    longest = max(len(truth.media_positions(one)), 8)
    few = captures(sites[: 128 // (2 * longest)])
    for asked in (
        [(two, {"capture": few}), (one, {"capture": few})],
        [(two, None), (text, {"capture": captures(sites)}), (one, None)],
    ):
        outs = generate(llm, asked)
        for out, (prompt, keys) in zip(outs, asked, strict=True):
            if keys is not None:
                assert rows_error(out.outputs[0], truth.rows(prompt, out.outputs[0].token_ids)) <= BOUND
    touched = [(start, end, first, last) for start, end, first, last in steps if start < last and end > first]
    assert touched and all(start <= first and end >= last for start, end, first, last in touched)
    with pytest.raises(weir.WeirError, match=r"rows in one step, the buffer holds 128.*raise the setting buffer_bytes"):
        generate(llm, [(one, {"capture": captures(sites)})])
    del outs, out
    assert_nothing_is_held(llm)


@needs(model_class(GEMMA3))
@pytest.mark.thorough
def test_pattern_where_tokens_of_an_image_see_each_other(root):
    """Refused with an image, and served with text alone."""
    llm, truth = engine(root, GEMMA3), reference(root, GEMMA3)
    text, one, _ = prompts(truth.recipe)
    for hook in MUTUAL:
        with pytest.raises(weir.WeirError, match="tokens of one image see each other") as e:
            generate(llm, [(one, {"capture": weir.Capture(hook)})])
        assert e.value.field == "capture[0].hook"
        (out,) = generate(llm, [(text, {"capture": weir.Capture(hook)})])
        assert rows_error(out.outputs[0], truth.rows(text, out.outputs[0].token_ids)) <= BOUND


@pytest.mark.parametrize("with_image", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_prompt_without_the_modality_is_refused(root, usual, with_image):
    llm, truth = engine(root, usual), reference(root, usual)
    prompt = prompts(truth.recipe)[with_image]
    name, said = ("audio", "no audio, but image") if with_image else ("image", "no image;")
    add = weir.Add(torch.ones(128), 1, positions={"modality": name})
    probe = weir.Probe("p", torch.ones(128), layer=1, positions={"modality": name})
    for keys, field in (
        ({"capture": weir.Capture("resid_post", positions={"modality": name})}, "capture[0].positions.modality"),
        ({"interventions": add}, "interventions[0].positions.modality"),
        ({"probes": probe}, "probes[0].positions.modality"),
    ):
        with pytest.raises(weir.WeirError, match=f"the prompt has {said}") as e:
            generate(llm, [(prompt, keys)])
        assert e.value.field == field
    with pytest.raises(weir.WeirError, match="a modality is one of image, audio, video"):
        weir.Capture("resid_post", positions={"modality": "smell"})
    assert_nothing_is_held(llm)


def test_interventions_of_every_request_act_on_images_alone(root, usual):
    """A prompt without images stays what it is; one with several is steered at each."""
    llm, truth = engine(root, usual), reference(root, usual)
    text, one, two = prompts(truth.recipe)
    site, vector = ("resid_post", 1), 3 * torch.randn(128, generator=torch.Generator().manual_seed(5))
    (plain,) = generate(llm, [(text, None)])
    weir.set_global(llm, [weir.Add(vector, site[1], positions={"modality": "image"})])
    try:
        capture = {"capture": captures(sites_of(llm, usual))}
        same, *moved = generate(llm, [(text, None), (one, capture), (two, capture)])
        assert same.outputs[0].token_ids == plain.outputs[0].token_ids
        for out, prompt in zip(moved, (one, two)):
            steer = (*site, vector, truth.media_positions(prompt))
            assert rows_error(out.outputs[0], truth.rows(prompt, out.outputs[0].token_ids, steer)) <= BOUND
    finally:
        weir.clear_global(llm)


def test_one_image_of_several(root, usual):
    """Read, steered and scored at that image alone; a prompt with fewer is refused, or passed over."""
    llm, truth = engine(root, usual), reference(root, usual)
    text, one, two = prompts(truth.recipe)
    between = truth.ids(two).index(truth.ids(Prompt("w5 w6", {}))[-1])
    at = truth.media_positions(two)
    items = [[p for p in at if p < between], [p for p in at if p > between]]
    assert all(items) and len(items[0]) != len(items[1])
    good, vector = sites_of(llm, usual), 3 * torch.randn(128, generator=torch.Generator().manual_seed(9))
    for index, expected in ((0, items[0]), (1, items[1]), (-2, items[0])):
        image = {"modality": "image", "index": index}
        (out,) = generate(llm, [(two, {"capture": captures(good, image)})])
        assert rows_error(out.outputs[0], truth.rows(two, out.outputs[0].token_ids), expected) <= BOUND
        probe = weir.Probe("seen", torch.ones(128), layer=2, positions=image)
        keys = {"capture": captures(good), "interventions": weir.Add(vector, 1, positions=image), "probes": probe}
        (out,) = generate(llm, [(two, keys)])
        steered = truth.rows(two, out.outputs[0].token_ids, ("resid_post", 1, vector, expected))
        assert rows_error(out.outputs[0], steered) <= BOUND
        assert out.outputs[0].scores.positions["seen"].tolist() == expected
    second = {"modality": "image", "index": 1}
    for prompt, field, said in ((one, "index", "item 1 of image has no position"), (text, "modality", "no image")):
        with pytest.raises(weir.WeirError, match=said) as e:
            generate(llm, [(prompt, {"capture": weir.Capture("resid_post", positions=second)})])
        assert e.value.field == f"capture[0].positions.{field}"
    (plain,) = generate(llm, [(one, {"capture": captures(good)})])
    weir.set_global(llm, [weir.Add(vector, 1, positions=second)])
    try:
        same, moved = generate(llm, [(one, {"capture": captures(good)}), (two, {"capture": captures(good)})])
        assert rows_error(same.outputs[0], truth.rows(one, plain.outputs[0].token_ids)) <= BOUND
        steered = truth.rows(two, moved.outputs[0].token_ids, ("resid_post", 1, vector, items[1]))
        assert rows_error(moved.outputs[0], steered) <= BOUND
    finally:
        weir.clear_global(llm)


def test_rows_by_position_and_scores_at_images(root, usual):
    """One vector for each of an image's positions; a probe there has a score for each."""
    llm, truth = engine(root, usual), reference(root, usual)
    one = prompts(truth.recipe)[1]
    at = truth.media_positions(one)
    vectors = torch.randn(len(at), 128, generator=torch.Generator().manual_seed(7))
    probe = weir.Probe("seen", torch.ones(128), layer=2, positions={"modality": "image"})
    keys = {"interventions": weir.Replace(vectors, 1, positions={"modality": "image"}), "probes": probe}
    (out,) = generate(llm, [(one, keys | {"capture": weir.Capture("resid_post")})])
    rows = out.activations["resid_post", 1]
    assert torch.allclose(rows[at], vectors, atol=1e-5)
    scores = out.outputs[0].scores
    assert scores.positions["seen"].tolist() == at
    expected = out.activations["resid_post", 2][at].sum(1)
    assert torch.allclose(scores["seen"].flatten(), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(weir.WeirError, match=f"3 rows for {len(at)} positions"):
        generate(llm, [(one, {"interventions": weir.Replace(vectors[:3], 1, positions={"modality": "image"})})])


def test_selectors_count_expanded_positions(root, usual):
    """A placeholder's token is found wherever it was expanded to; negative positions count from the expanded end."""
    llm, truth = engine(root, usual), reference(root, usual)
    one = prompts(truth.recipe)[1]
    ids = truth.ids(one)
    rows = truth.rows(one, [0, 0])
    at = truth.media_positions(one)
    selectors = {"last_prompt": [len(ids) - 1], -3: [len(ids) - 3], "2:9:3": [2, 5, 8]}
    for selector, positions in [({"token_ids": [ids[at[0]]]}, at), *selectors.items()]:
        (out,) = llm.generate(
            [one.for_vllm], weir.params(sampling(1), capture=weir.Capture("resid_post", 1, selector)), use_tqdm=False
        )
        assert rows_error(out.outputs[0], rows, positions) <= BOUND
        assert out.activations.token_ids_of("resid_post", 1).tolist() == [ids[p] for p in positions]


def test_the_prefix_cache_tells_images_apart(root, usual):
    """Same text, another image: nothing of the image is taken from the cache; the same image again: a hit."""
    llm, truth = engine(root, usual), reference(root, usual)
    words = " ".join(f"w{k}" for k in range(40))
    seen = [
        Prompt(f"w400 {truth.recipe.media['image']} {words}", {"image": (picture((56, 56), seed),)})
        for seed in (11, 12)
    ]
    hits = []
    for prompt in (*seen, seen[0]):
        asked = captures([site for site in sites_of(llm, usual) if site[0] not in MUTUAL], "sampled")
        (out,) = generate(llm, [(prompt, {"capture": asked})])
        ids = truth.ids(prompt)
        positions = list(range(len(ids) - 1, len(ids) + G - 1))
        rows = truth.rows(prompt, out.outputs[0].token_ids)
        assert rows_error(out.outputs[0], rows, positions) <= BOUND
        hits.append(out.num_cached_tokens)
    assert hits[1] == 0 and hits[2] >= 32
    add = weir.Add(torch.ones(128), 1, positions={"modality": "image"})
    before, (steered,), after = (
        generate(llm, [(seen[0], None)]),
        generate(llm, [(seen[0], {"interventions": add})]),
        generate(llm, [(seen[0], None)]),
    )
    assert steered.num_cached_tokens == 0
    assert before[0].outputs[0].token_ids == after[0].outputs[0].token_ids


def test_an_aborted_request_leaves_nothing(root, usual):
    llm, truth = engine(root, usual), reference(root, usual)
    two = prompts(truth.recipe)[2]
    params = weir.params(sampling(50), capture=captures(sites_of(llm, usual)))
    (request,) = llm.enqueue([two.for_vllm], params, use_tqdm=False)
    for _ in range(3):  # in the middle of the prompt, and of an image
        llm.llm_engine.step()
    llm.llm_engine.abort_request([request], internal=True)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    assert not scheduler(llm).requests
    assert_nothing_is_held(llm)
