"""Gemma 3, whose positions of one image attend to each other both ways, as a GPU's attention has it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import vllm_weir as weir
from tests.conformance.checks import served
from tests.conformance.multimodal.build import build
from tests.conformance.multimodal.check import MUTUAL, Prompt, Reference, captures, picture, rows_error
from tests.conformance.multimodal.recipes import RECIPES
from tests.support.engines import get_llm

pytestmark = pytest.mark.gpu
BLOCK, TOKENS, SIDE = 16, 64, 112
"""Positions of a block, positions of an image, pixels: an image spans several blocks."""
BOUND = 5e-3  # attention in float32 rounds its products as TF32 there
GEMMA3 = RECIPES["Gemma3ForConditionalGeneration"]
G = 4


def config(ids):
    made = GEMMA3.config(ids)
    made["text_config"] |= {"sliding_window": 96}
    made["vision_config"] |= {"image_size": SIDE}
    return made | {"mm_tokens_per_image": TOKENS}


def processor(tokenizer, _config):
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    images = Gemma3ImageProcessor(size={"height": SIDE, "width": SIDE})
    return Gemma3Processor(images, tokenizer, image_seq_length=TOKENS)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    where = tmp_path_factory.mktemp("models") / "gemma3"
    recipe = replace(GEMMA3, variant="long", config=config, processor=processor)
    return Reference(recipe, build(recipe, where), on_cpu=False), where


@pytest.fixture(scope="module", params=["full", "eager"])
def llm(request, reference):
    return get_llm(
        reference[1],
        dtype="float32",
        enforce_eager=request.param == "eager",
        kv_cache_memory_bytes=1 << 30,
        block_size=BLOCK,
        limit_mm_per_prompt={"image": 2},
        max_model_len=512,
    )


def prompt(seed):
    """Text that fills more than a block, an image, and text."""
    before, after = (" ".join(f"w{(7 * k + n) % 400}" for k in range(20)) for n in (0, 3))
    return Prompt(f"{before} <start_of_image> {after}", {"image": (picture((SIDE, SIDE), seed),)})


def generate(llm, asked, **more):
    from vllm import SamplingParams

    base = SamplingParams(max_tokens=G, temperature=0, ignore_eos=True, **more)
    params = [base if keys is None else weir.params(base, **keys) for _, keys in asked]
    return llm.generate([one.for_vllm for one, _ in asked], params, use_tqdm=False)


def sites(llm):
    return [site for site in served(weir.sites(llm)) if site[0] not in MUTUAL]


def test_rows_and_steering_reach_earlier_positions_of_the_image(reference, llm):
    """What is added at an image's last position is seen at its first; without the rule it would not be."""
    truth, _ = reference
    one = prompt(1)
    at = truth.media_positions(one)
    assert len(at) == TOKENS and truth.oracle.model.config.text_config.sliding_window > TOKENS
    vector = 3 * torch.randn(128, generator=torch.Generator().manual_seed(5))
    add = weir.Add(vector, 0, positions=[at[-1]])
    everything = captures(sites(llm))
    plain, steered = generate(
        llm, [(one, {"capture": everything}), (one, {"capture": everything, "interventions": add})]
    )
    rows = truth.rows(one, plain.outputs[0].token_ids)
    moved = truth.rows(one, steered.outputs[0].token_ids, ("resid_post", 0, vector, [at[-1]]))
    assert rows_error(plain.outputs[0], rows) <= BOUND
    assert rows_error(steered.outputs[0], moved) <= BOUND
    site = ("resid_post", 2)
    here = torch.stack([found.activations[site][at[0]] for found in (plain, steered)])
    there = torch.stack([found[site][at[0]] for found in (rows, moved)])
    change = there[1] - there[0]
    # The change itself, of which each side's rounding is a small part.
    assert change.abs().max() > 2 * BOUND * there.abs().max()
    assert torch.nn.functional.cosine_similarity(here[1] - here[0], change, dim=0) > 0.99


def test_no_block_of_an_image_is_shared_with_what_acts_before_its_end(reference, llm):
    """Blocks before the image are; plain requests share all, and go on as if nobody had steered."""
    truth, _ = reference
    one = prompt(2)
    at, length = truth.media_positions(one), len(truth.ids(one))
    shared = at[0] // BLOCK * BLOCK
    assert shared > 0 and at[-1] // BLOCK > at[0] // BLOCK + 1
    where = captures(sites(llm), "sampled")  # a capture of earlier positions would limit what the cache gives
    vectors = [3 * torch.randn(128, generator=torch.Generator().manual_seed(seed)) for seed in (6, 7)]
    (plain,) = generate(llm, [(one, {"capture": where})])
    for vector in (*vectors, vectors[0]):
        keys = {"capture": where, "interventions": weir.Add(vector, 0, positions=[at[-1]])}
        (steered,) = generate(llm, [(one, keys)])
        assert steered.num_cached_tokens == shared
        moved = truth.rows(one, steered.outputs[0].token_ids, ("resid_post", 0, vector, [at[-1]]))
        assert rows_error(steered.outputs[0], moved, range(length - 1, length + G - 1)) <= BOUND
        (again,) = generate(llm, [(one, {"capture": where})])
        assert again.num_cached_tokens == (length - 1) // BLOCK * BLOCK
        assert again.outputs[0].token_ids == plain.outputs[0].token_ids
        rows = truth.rows(one, again.outputs[0].token_ids)
        assert rows_error(again.outputs[0], rows, range(length - 1, length + G - 1)) <= BOUND
    # What acts behind the image alone shares its blocks.
    keys = {"capture": where, "interventions": weir.Add(vectors[0], 0, positions=[length - 1])}
    (behind,) = generate(llm, [(one, keys)])
    assert behind.num_cached_tokens >= at[-1] // BLOCK * BLOCK
