"""Images over HTTP: a tiny LLaVA that `weir serve` serves, against transformers."""

from __future__ import annotations

import base64
import io

import pytest
import torch

import vllm_weir as weir
from tests.conformance.multimodal.build import build
from tests.conformance.multimodal.check import Prompt, Reference, captures, picture, rows_error
from tests.conformance.multimodal.recipes import RECIPES
from tests.engine.serving import API_KEY, ARGS, WEIR, running
from tests.support.machine import engine_processes, module, needs

pytestmark = [
    pytest.mark.engine,
    pytest.mark.thorough,
    pytest.mark.timeout(900),
    needs(engine_processes, module("torchvision")),
]
CLOSE_OTHERS = True
BOUND = 1e-5
LLAVA = RECIPES["LlavaForConditionalGeneration"]
IMAGE = {"modality": "image"}
SAME = dict(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    where = build(LLAVA, tmp_path_factory.mktemp("models") / "llava")
    return where, Reference(LLAVA, where)


@pytest.fixture(scope="module")
def client(reference, tmp_path_factory):
    more = ["--limit-mm-per-prompt", '{"image": 2}', "--skip-mm-profiling"]
    log = tmp_path_factory.mktemp("server") / "log"
    http = running(log, WEIR, *more, args=ARGS, model=str(reference[0]), forked=True)
    with http as served, weir.Client(str(served.base_url).rstrip("/"), API_KEY) as found:
        yield found


def conversation(*seeds):
    """Messages with pictures in base64, and the prompt that the template makes of them."""
    parts, items = [], []
    for seed in seeds:
        items.append(picture((56, 56), seed))
        file = io.BytesIO()
        items[-1].save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    parts.append({"type": "text", "text": "w5 w6 w7 w8"})
    text = f"user {'<image>' * len(items)} w5 w6 w7 w8 "
    return [{"role": "user", "content": parts}], Prompt(text, {"image": tuple(items)})


def test_rows_at_images(client, reference):
    """Inline and by reference, of one picture and of two; the second time from the caches."""
    truth = reference[1]
    sites = [("embed", 0), ("resid_post", 0), ("resid_post", 2), ("mlp_out", 1)]
    for seeds in ((1,), (2, 1), (1,)):
        messages, prompt = conversation(*seeds)
        for inline in (8 << 20, 0):
            out = client.chat(messages, **SAME, capture=captures(sites, IMAGE), inline_bytes=inline)
            (choice,) = out.choices
            assert list(out.prompt_token_ids) == truth.ids(prompt)
            at = truth.media_positions(prompt)
            assert len(at) == 16 * len(seeds)
            assert rows_error(choice, truth.rows(prompt, choice.token_ids), at) <= BOUND


def test_rows_at_one_image_of_two(client, reference):
    """Each has 16 positions; a conversation with one has no second, and the refusal says so."""
    truth = reference[1]
    messages, prompt = conversation(2, 1)
    at = truth.media_positions(prompt)
    for index, expected in ((0, at[:16]), (-1, at[16:])):
        asked = captures([("resid_post", 2)], IMAGE | {"index": index})
        (choice,) = client.chat(messages, **SAME, capture=asked).choices
        assert rows_error(choice, truth.rows(prompt, choice.token_ids), expected) <= BOUND
    with pytest.raises(weir.WeirError, match="item 1 of image has no position") as e:
        client.chat(conversation(1)[0], **SAME, capture=weir.Capture("resid_post", 0, IMAGE | {"index": 1}))
    assert e.value.field == "capture[0].positions.index"


def test_steering_at_images(client, reference):
    truth = reference[1]
    messages, prompt = conversation(3)
    vector = 2 * torch.randn(128, generator=torch.Generator().manual_seed(1))
    steer = weir.Add(vector, 1, positions=IMAGE)
    out = client.chat(messages, **SAME, capture=captures([("resid_post", 2), ("final_norm", 0)]), interventions=steer)
    (choice,) = out.choices
    moved = ("resid_post", 1, vector, truth.media_positions(prompt))
    rows = truth.rows(prompt, choice.token_ids, moved)
    assert rows_error(choice, rows) <= BOUND
    assert not torch.allclose(rows["resid_post", 2], truth.rows(prompt, choice.token_ids)["resid_post", 2], atol=0.1)


def test_a_refused_request_leaves_the_image_to_the_next(client, reference):
    """A new image in a request that is refused: vLLM has noted it as sent, and it comes again."""
    truth = reference[1]
    messages, prompt = conversation(9)
    for asked, field in (
        (weir.Capture("resid_post", positions={"modality": "audio"}), "capture[0].positions.modality"),
        (weir.Capture("resid_post", 77), "capture[0].layers"),
    ):
        with pytest.raises(weir.WeirError) as e:
            client.chat(messages, **SAME, capture=asked)
        assert e.value.field == field
    out = client.chat(messages, **SAME, capture=captures([("resid_post", 2)]))
    assert rows_error(out.choices[0], truth.rows(prompt, out.choices[0].token_ids)) <= BOUND
    with pytest.raises(weir.WeirError, match="the prompt has no image"):
        client.chat([{"role": "user", "content": "w1 w2"}], **SAME, capture=weir.Capture("resid_post", 0, IMAGE))
