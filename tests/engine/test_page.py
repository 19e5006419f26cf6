"""The page at /weir in a real browser: a script types, clicks and slides, and checks colours against the API."""

from __future__ import annotations

import os
import re
import urllib.parse
from pathlib import Path

import numpy as np
import pytest

from tests.engine.serving import API_KEY, LENS, SAE, jacobians, post, rows_of
from tests.support import machine
from vllm_weir.schema.vectors import Vector

pytestmark = [
    pytest.mark.engine("server"),
    pytest.mark.timeout(900),
    machine.needs(machine.chromium, machine.engine_processes),
]
LAYER = 2
HAPPY = 100
"""The shipped autoencoder's feature of happy stories."""
TEXT = "Tell me a story about the garden."
PLUS, MINUS = "a dog and a dog", "the cat on the hill"
APART = 1e-4
"""How far scores of two requests may be apart, of the largest: they may share cached tokens, and then round apart."""
SCREENSHOTS = os.environ.get("WEIR_SCREENSHOTS")
"""Where the pictures for the docs go; without it they are made in the test's own directory."""


@pytest.fixture(scope="module")
def server(weir_server, tmp_path_factory):
    """The shared server with two vectors: a mood, and any other direction."""
    http, folder = weir_server.http, tmp_path_factory.mktemp("page")
    mood = rows(http, "Tom was happy.", "-2:", folder) - rows(http, "Tom was sad.", "-2:", folder)
    odd = np.random.default_rng(5).standard_normal(len(mood)).astype(np.float32)
    for name, vector in (("happy", mood), ("odd", odd)):
        body = {"vector": Vector.parse(vector, "vector").to_json()}
        weir_server.admin("PUT", f"/v1/vectors/{name}", json=body).raise_for_status()
    return http


def rows(client, text: str, positions: str, folder: Path) -> np.ndarray:
    """[d_model]: the mean of a text's rows after block LAYER."""
    capture = [{"hook": "resid_post", "layers": [LAYER], "positions": positions, "reduce": "mean"}]
    (choice,) = post(client, prompt=text, max_tokens=1, weir={"v": 1, "capture": capture})["choices"]
    return rows_of(client, choice, folder)["resid_post", LAYER][0].numpy().copy()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=machine.browser(), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server):
    page = browser.new_page(viewport={"width": 1200, "height": 780}, color_scheme="light")
    page.set_default_timeout(240_000)
    problems: list[str] = []
    page.on("pageerror", lambda e: problems.append(str(e)))
    page.goto(f"{str(server.base_url).rstrip('/')}/weir")
    page.fill("#key", API_KEY)
    page.dispatch_event("#key", "change")
    page.wait_for_selector("#model:has-text('demo,')")
    page.wait_for_selector("#probe option[value=happy]", state="attached")
    page.wait_for_selector(f"#sae option[value={SAE}]", state="attached")
    page.wait_for_selector("#try button")
    yield page
    assert not problems
    page.close()


def say(page, text: str) -> list[dict]:
    """Send a message; the tokens of the reply, of the steered one if there are two, once it is there in whole."""
    page.fill("#text", text)
    page.press("#text", "Enter")
    return answered(page)


def answered(page, way: str = "last") -> list[dict]:
    """The tokens of the last turn's reply: its "last" or its "first"."""
    page.wait_for_selector("#send:not([disabled])")
    assert page.inner_text("#error") == ""
    return page.eval_on_selector_all(
        f"#messages li:last-child .way:{way}-child .token",
        "spans => spans.map(s => ({text: s.textContent, score: Number(s.dataset.score)}))",
    )


def text_of(tokens: list[dict]) -> str:
    return "".join(token["text"] for token in tokens)


def steer(page, vector: str, scale: float, unit: str = "vector") -> None:
    page.select_option(f"[data-unit-of={vector}]", unit)
    page.eval_on_selector(
        f"[data-steer={vector}]", f"s => {{ s.value = {scale}; s.dispatchEvent(new Event('input')); }}"
    )


def asked(server, messages, **weir_object) -> dict:
    body = {"model": "demo", "messages": messages, "max_tokens": 64, "temperature": 0, "weir": {"v": 1, **weir_object}}
    answer = server.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    return answer.json()["choices"][0]


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def scores_of(server, name: str = "happy", **weir_object) -> tuple[np.ndarray, dict]:
    """[tokens, blocks] of the first reply to TEXT, and its choice."""
    capture = {"hook": "resid_post", "layers": "all", "positions": "sampled", "project": {"ref": name}}
    choice = asked(server, user(TEXT), capture=[capture], **weir_object)
    sites = choice["weir"]["scores"]["sites"]
    return np.array([[row[0] for row in sites[f"resid_post.{layer}"]] for layer in range(len(sites))]).T, choice


def picture(page, name: str, tmp_path: Path) -> None:
    page.screenshot(path=str(Path(SCREENSHOTS or tmp_path) / f"{name}.png"))


def test_tokens_have_the_colour_of_their_score(page, server, tmp_path):
    page.select_option("#probe", "happy")
    page.fill("#probe-layer", str(LAYER))
    tokens = say(page, TEXT)
    expected, choice = scores_of(server)
    assert "".join(t["text"] for t in tokens) == choice["message"]["content"]
    got = np.array([t["score"] for t in tokens])
    assert np.abs(got - expected[:, LAYER]).max() <= APART * np.abs(expected).max()
    assert painted(page, expected[:, LAYER])
    assert not painted(page, expected[:, 0])
    picture(page, "page", tmp_path)
    # Another block: painted again from what is there.
    page.fill("#probe-layer", "0")
    assert painted(page, expected[:, 0])


def painted(page, scores: np.ndarray) -> bool:
    """Whether the tokens have the colours of these scores; browsers keep eight bits of a colour's strength."""
    found = page.eval_on_selector_all(".token", "s => s.map(t => getComputedStyle(t).backgroundColor)")
    for colour, score in zip(found, scores, strict=True):
        *rgb, alpha = [float(x) for x in re.findall(r"[\d.]+", colour)]
        hue = [29, 99, 184] if score > 0 else [214, 40, 40]
        if rgb != hue or abs(alpha - 0.75 * abs(score) / np.abs(scores).max()) > 0.008:
            return False
    return True


def test_a_slider_steers_the_next_reply(page, server, tmp_path):
    page.select_option("#probe", "happy")
    page.fill("[data-layer-of=happy]", "2")
    steer(page, "happy", -2)
    tokens = say(page, TEXT)
    add = {"op": "add", "vector": {"ref": "happy"}, "layers": [2], "scale": -2.0}
    _, steered = scores_of(server, interventions=[add])
    _, plain = scores_of(server)
    assert text_of(tokens) == steered["message"]["content"] != plain["message"]["content"]
    assert text_of(answered(page, "first")) == plain["message"]["content"]
    assert page.locator(".way b").all_inner_texts() == ["unsteered", "steered"]
    notes = page.locator(".note").all_inner_texts()
    assert "steered by" not in notes[0] and "steered by happy × -2 at block 2" in notes[1]
    # Both are coloured on one scale.
    largest = max(abs(t["score"]) for t in [*tokens, *answered(page, "first")])
    assert float(page.inner_text("#high")) == pytest.approx(largest, rel=1e-3)
    picture(page, "page_steered", tmp_path)


def test_a_message_is_answered_again(page, server, tmp_path):
    """With what is set now, in place of the reply; alone where no slider is moved, or the other is not wanted."""
    assert page.is_disabled("#again")
    plain = text_of(say(page, TEXT))
    assert page.locator(".way").count() == 1
    page.fill("[data-layer-of=happy]", "2")
    steer(page, "happy", -0.5, "row")
    page.click("#again")
    add = {"op": "add", "vector": {"ref": "happy"}, "layers": [2], "scale": -0.5, "norm_match": True}
    steered = asked(server, user(TEXT), interventions=[add])["message"]["content"]
    assert text_of(answered(page)) == steered != plain == text_of(answered(page, "first"))
    assert page.locator("#messages li").count() == 2
    assert "steered by happy × -0.5 of each row's norm at block 2" in page.inner_text(".way:last-child .note")
    page.uncheck("#both")
    page.click("#again")
    assert text_of(answered(page)) == steered and page.locator(".way").count() == 1
    # The chat goes on from the steered reply.
    follow = [*user(TEXT), {"role": "assistant", "content": steered}, *user("Tell me a sad story.")]
    assert (
        text_of(say(page, "Tell me a sad story.")) == asked(server, follow, interventions=[add])["message"]["content"]
    )
    # What is refused leaves the reply that there was.
    page.fill("#max-tokens", "0")
    page.click("#again")
    page.wait_for_selector("#error:not([hidden])")
    assert page.locator("#messages li").count() == 4 and page.is_enabled("#again")


def test_a_seed_gives_the_same_reply_again(page):
    page.fill("#temperature", "1")
    page.fill("#seed", "7")
    first = text_of(say(page, TEXT))
    page.click("#again")
    assert text_of(answered(page)) == first
    page.fill("#seed", "8")
    page.click("#again")
    assert text_of(answered(page)) != first


def test_a_link_brings_another_to_the_same_state(browser, page, server):
    """Made vectors and features, too; nothing runs before somebody sends, and the key is not in it."""
    for name, value in (("#new-name", "dogs"), ("#new-plus", PLUS), ("#new-minus", MINUS), ("#new-layer", "2")):
        page.fill(name, value)
    page.click("#new-make")
    page.wait_for_selector("[data-steer=dogs]")
    page.select_option("#probe", "happy")
    page.fill("[data-layer-of=happy]", "1")
    page.fill("#max-tokens", "12")
    page.fill("#feature-number", str(HAPPY))
    page.click("#feature-add")
    slide(page, HAPPY, -2.25)
    steer(page, "happy", 0.75)
    steer(page, "dogs", -1)
    tokens = say(page, TEXT)
    page.click("#share")
    page.wait_for_selector("#share:has-text('Link')")
    assert API_KEY not in page.url and "dogs" in page.url
    other = browser.new_page()
    sent: list[str] = []
    other.on("request", lambda r: sent.append(r.method))
    other.goto(page.url)
    other.fill("#key", API_KEY)
    other.dispatch_event("#key", "change")
    other.wait_for_selector("[data-steer=dogs]")
    assert other.input_value("#text") == TEXT and set(sent) == {"GET"}
    assert other.input_value("[data-steer=happy]") == "0.75" and other.input_value("[data-layer-of=happy]") == "1"
    assert other.input_value(f"[data-value-of='{SAE}/{HAPPY}']") == "-2.25"
    assert other.input_value("#probe") == "happy" and other.input_value("#max-tokens") == "12"
    other.press("#text", "Enter")
    assert text_of(answered(other)) == text_of(tokens)
    other.close()


@pytest.mark.parametrize(
    ("fragment", "said"),
    [
        ("weir", "damaged"),
        (
            '{"text":"","made":[],"vectors":[{"name":"<img src=x>","scale":1,"unit":"row","layer":0}],'
            '"features":[{"sae":"mood","feature":512,"value":1}],"inputs":[{"id":"key","value":"x"},'
            '{"id":"seed","value":"-1"}]}',
            "lacks what the link sets: the vector <img src=x>, feature 512 of mood, key x, seed -1.",
        ),
    ],
)
def test_links_that_do_not_fit_say_so(browser, server, fragment, said):
    page = browser.new_page()
    page.goto(f"{str(server.base_url).rstrip('/')}/weir#{urllib.parse.quote(fragment)}")
    page.fill("#key", API_KEY)
    page.dispatch_event("#key", "change")
    page.wait_for_selector(f"#error:has-text('{said}')")
    assert page.input_value("#key") == API_KEY and page.input_value("#seed") == "0"
    assert page.locator("img").count() == 0
    page.close()


def test_messages_to_try_and_words_that_the_model_lacks(page):
    said = page.inner_text("#try button >> nth=0")
    page.click("#try button >> nth=0")
    assert len(answered(page)) > 5 and page.is_hidden("#try")
    assert page.inner_text("#messages .user").endswith(said) and page.locator(".unread").count() == 0
    say(page, "Tell me about a spaceship.")
    page.wait_for_selector(".unread:has-text('does not know “spaceship”. Words outside the model')")
    page.click("#clear")
    assert page.is_visible("#try")


def test_a_narrow_page_does_not_overflow(page, tmp_path):
    """With all that it can show: two replies, the map, heads, features and sliders."""
    page.set_viewport_size({"width": 390, "height": 844})
    page.select_option("#probe", "happy")
    page.fill("#feature-number", str(HAPPY))
    page.click("#feature-add")
    steer(page, "happy", -2)
    say(page, TEXT)
    page.evaluate("() => scrollTo(0, 0)")
    picture(page, "page_narrow", tmp_path)
    page.click("#messages .token >> nth=5")
    page.wait_for_selector("#neurons li")
    widths = page.evaluate("() => [document.documentElement.scrollWidth, innerWidth]")
    assert widths == [390, 390]
    wide = page.eval_on_selector_all(
        "aside *, header *, #composer *, #messages *, #try, #map",
        "all => all.filter(e => e.getBoundingClientRect().right > 391).map(e => e.outerHTML)",
    )
    assert wide == []


def test_a_click_shows_blocks_by_tokens(page, server, tmp_path):
    page.select_option("#probe", "odd")
    tokens = say(page, TEXT)
    page.click("#messages .token >> nth=3")
    cells = page.eval_on_selector_all(
        "#map-table td",
        "cells => cells.map(c => [Number(c.dataset.token), Number(c.dataset.layer), Number(c.dataset.score)])",
    )
    expected, _ = scores_of(server, "odd")
    shown = min(len(tokens), 3 + 17)
    assert len(cells) == shown * expected.shape[1]
    for token, layer, score in cells:
        assert abs(score - expected[token, layer]) <= APART * np.abs(expected).max()
    assert page.inner_text("#map-title") == "Scores of odd by block and token"
    picture(page, "page_heat_map", tmp_path)


def test_a_click_shows_heads_and_neurons(page, server, tmp_path):
    """Of the position that the token was sampled from, as a request for the same tokens gets them."""
    say(page, TEXT)
    page.click("#messages .token >> nth=3")
    page.fill("#inside-layer", str(LAYER))
    with page.expect_response("**/v1/completions"):
        page.dispatch_event("#inside-layer", "change")
    page.wait_for_function("() => document.querySelector('#inside-note').textContent === ''")
    cells = page.eval_on_selector_all(
        "#heads-table td", "cells => cells.map(c => [c.dataset.head, c.dataset.key, c.dataset.weight].map(Number))"
    )
    listed = page.eval_on_selector_all(
        "#neurons li", "items => items.map(i => [i.dataset.neuron, i.dataset.value].map(Number))"
    )
    body = {"model": "demo", "messages": user(TEXT), "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    answer = server.post("/v1/chat/completions", json=body).raise_for_status().json()
    ids = answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
    capture = [{"hook": hook, "layers": [LAYER], "positions": [len(ids) - 1]} for hook in ("pattern", "mlp_post")]
    body = {"model": "demo", "prompt": ids, "max_tokens": 1, "weir": {"v": 1, "capture": capture}}
    (choice,) = server.post("/v1/completions", json=body).raise_for_status().json()["choices"]
    acts = rows_of(server, choice, tmp_path)
    pattern, neurons = acts["pattern", LAYER][0].float(), acts["mlp_post", LAYER][0].float()
    assert len(cells) == pattern.numel() and pattern.shape[1] == len(ids)
    # The two requests may share cached tokens, so they round apart.
    assert max(abs(weight - float(pattern[int(head), int(key)])) for head, key, weight in cells) <= 1e-2
    largest = float(neurons.abs().max())
    assert max(abs(value - float(neurons[int(neuron)])) for neuron, value in listed) <= 2e-2 * largest
    twelfth = float(neurons.abs().sort(descending=True).values[11])
    assert len(listed) == 12 and min(abs(value) for _, value in listed) >= twelfth - 2e-2 * largest
    picture(page, "page_inside", tmp_path)


def features_of(server, top_k=8, **weir_object) -> list[list[tuple[int, float]]]:
    """The active features at the position that each token of the first reply to TEXT was sampled from."""
    asked_for = [{"name": "mood", "top_k": top_k, "positions": "sampled"}]
    found = asked(server, user(TEXT), features=asked_for, **weir_object)["weir"]["features"]["mood"]
    rows = zip(found["ids"], found["values"], strict=True)
    return [[(i, v) for i, v in zip(ids, values, strict=True) if v > 0] for ids, values in rows]


def same_features(found, expected) -> bool:
    """Whether these are the same features with the same activations; two requests may round apart."""
    return sorted(i for i, _ in found) == sorted(i for i, _ in expected) and all(
        abs(value - dict(expected)[i]) <= 1e-3 * max(1.0, value) for i, value in found
    )


def test_a_token_shows_its_features(page, server, tmp_path):
    """Under the pointer, and in a list when it is clicked: those that a request gets."""
    page.select_option("#probe", "happy")
    page.fill("#probe-layer", str(LAYER))
    tokens = say(page, TEXT)
    expected = features_of(server)
    titles = page.eval_on_selector_all("#messages .token", "spans => spans.map(s => s.title)")
    assert len(titles) == len(expected) == len(tokens)
    for title, features in zip(titles, expected, strict=True):
        score, line = title.split("\n")
        assert score.startswith(f"happy at block {LAYER}: ") and line.startswith("mood: ")
        shown = [(int(i), float(v)) for i, v in re.findall(r"(\d+) [^(]*\(([^)]+)\)", line)]
        assert same_features(shown, features)
        assert [v for _, v in shown] == sorted((v for _, v in shown), reverse=True)
    page.hover("#messages .token >> nth=5")
    page.click("#messages .token >> nth=5")
    listed = page.eval_on_selector_all(
        "#token-features-list button", "all => all.map(b => [b.dataset.feature, b.dataset.value].map(Number))"
    )
    assert same_features([(int(i), v) for i, v in listed], expected[5])
    labels = server.get("/v1/saes/mood").json()["labels"]
    texts = page.locator("#token-features-list button").all_inner_texts()
    assert all(text.startswith(f"{i} {labels[str(int(i))]}: ") for text, (i, _) in zip(texts, listed, strict=True))
    assert page.inner_text("#token-features-title") == "Features of mood"
    page.select_option("#sae", "")
    page.click("#clear")
    say(page, TEXT)
    page.click("#messages .token >> nth=5")
    assert page.is_hidden("#token-features")
    assert "mood" not in page.get_attribute("#messages .token >> nth=5", "title")


@pytest.mark.parametrize("lens", ["logit", LENS])
def test_a_token_shows_what_a_lens_reads(page, server, tmp_path, lens):
    """Under the pointer by block, and in a table when it is clicked: what a request gets, beside the other colours."""
    named = lens == LENS
    page.select_option("#probe", "happy")
    page.select_option("#lens", f"name:{lens}" if named else lens)
    tokens = say(page, TEXT)
    layers = [*sorted(jacobians()), 5] if named else "all"
    wire = {"layers": layers, "top_k": 5, "positions": "sampled"} | ({"name": lens} if named else {})
    read = asked(server, user(TEXT), lens=wire)["weir"]["lens"]
    assert len(read["5"]["token_ids"]) == len(tokens)
    assert page.is_hidden("#reading")
    page.hover("#messages .token >> nth=5")
    page.wait_for_function("() => document.querySelectorAll('#messages .token')[5].title.includes('block 5: ')")
    lines = page.get_attribute("#messages .token >> nth=5", "title").split("\n")
    shown = [re.fullmatch(r"block (\d+): (.*) \(([\d.e-]+)%\)", line) for line in lines]
    shown = [(int(m[1]), m[2], float(m[3])) for m in shown if m]
    assert [block for block, *_ in shown] == sorted(map(int, read), reverse=True)
    for block, _, percent in shown:
        assert abs(percent / 100 - np.exp(read[str(block)]["logprobs"][5][0])) <= 2e-3
    # The logits of the last block are the model's own, which has sampled its likeliest token.
    assert shown[0][1] == tokens[5]["text"].strip()
    page.click("#messages .token >> nth=5")
    page.wait_for_selector("#reading-table td")
    cells = page.eval_on_selector_all(
        "#reading-table td", "all => all.map(c => [c.dataset.layer, c.dataset.id, c.dataset.probability].map(Number))"
    )
    assert len(cells) == 5 * len(read)
    for block, token, probability in cells:
        expected = dict(zip(read[str(int(block))]["token_ids"][5], read[str(int(block))]["logprobs"][5], strict=True))
        assert probability < 2e-3 or abs(probability - np.exp(expected[int(token)])) <= 2e-3
    assert page.inner_text("#reading-table tr:first-child td.chosen").strip() == tokens[5]["text"].strip()
    assert ("the logit lens" if lens == "logit" else lens) in page.inner_text("#reading-title")
    picture(page, "page_lens", tmp_path)
    page.select_option("#lens", "")
    page.click("#clear")
    say(page, TEXT)
    page.click("#messages .token >> nth=5")
    assert page.is_hidden("#reading")


def test_a_slider_sets_a_feature(page, server, tmp_path):
    """One that was chosen by its number, and one from a token's list; each reply as a request gets it."""
    say(page, TEXT)
    page.fill("#feature-number", str(HAPPY))
    page.click("#feature-add")
    page.click("#messages .token >> nth=5")
    page.click("#token-features-list button >> nth=1")
    other, activation = page.eval_on_selector(
        "#token-features-list li:nth-child(2) button", "b => [b.dataset.feature, b.dataset.value].map(Number)"
    )
    assert float(page.input_value(f"[data-value-of='mood/{other}']")) == pytest.approx(activation, rel=1e-3)
    slide(page, HAPPY, -8)
    slide(page, other, 2.5)
    page.click("#map-close")
    page.click("#clear")
    tokens = say(page, TEXT)
    set_both = [
        {"op": "set_feature", "name": "mood", "feature": HAPPY, "value": -8.0},
        {"op": "set_feature", "name": "mood", "feature": other, "value": 2.5},
    ]
    steered, plain = (asked(server, user(TEXT), interventions=some) for some in (set_both, []))
    assert "".join(t["text"] for t in tokens) == steered["message"]["content"] != plain["message"]["content"]
    note = re.sub(r"(feature \d+) .*? of mood", r"\1 of mood", page.inner_text(".way:last-child .note"))
    assert f"steered by feature {HAPPY} of mood = -8, feature {int(other)} of mood = 2.5" in note
    page.click("#messages .way:last-child .token >> nth=5")
    page.wait_for_selector("#neurons li")
    listed = dict(features_of(server, interventions=set_both)[5])
    shown = page.eval_on_selector_all(
        "#token-features-list button", "all => all.map(b => [b.dataset.feature, b.dataset.value].map(Number))"
    )
    assert same_features([(int(i), v) for i, v in shown], list(listed.items()))
    picture(page, "page_features", tmp_path)
    page.click(f"[data-drop='mood/{other}']")
    page.click(f"[data-drop='mood/{HAPPY}']")
    assert page.is_visible("#no-features") and page.locator("[data-set-feature]").count() == 0
    page.click("#clear")
    assert "".join(t["text"] for t in say(page, TEXT)) == plain["message"]["content"]


def slide(page, feature: int, value: float) -> None:
    move = f"s => {{ s.value = {value}; s.dispatchEvent(new Event('input')); }}"
    page.eval_on_selector(f"[data-set-feature='mood/{feature}']", move)


def test_features_that_there_are_not(page, server):
    """The page says which there are; what the server refuses is shown with its field."""
    page.fill("#feature-number", "512")
    page.click("#feature-add")
    assert page.inner_text("#error") == "Features of mood are numbers from 0 to 511."
    page.fill("#feature-number", "3")
    page.click("#feature-add")
    assert page.is_hidden("#error")
    page.fill("[data-value-of='mood/3']", "1e39")
    page.fill("#text", TEXT)
    page.press("#text", "Enter")
    page.wait_for_selector("#error:has-text('400: interventions[0].value')")
    assert page.input_value("#text") == TEXT


def test_a_vector_from_two_texts(page, server, tmp_path):
    page.fill("#new-name", "dogs")
    page.fill("#new-plus", PLUS)
    page.fill("#new-minus", MINUS)
    page.fill("#new-layer", str(LAYER))
    page.click("#new-make")
    page.wait_for_selector("[data-steer=dogs], #error:not([hidden])")
    assert page.inner_text("#error") == ""
    assert page.input_value("#probe") == "dogs"
    assert "This model does not know “a”, “dog”, “the”, “cat”" in page.inner_text("#new-unread")
    tokens = say(page, TEXT)
    apart = rows(server, PLUS, "prompt", tmp_path) - rows(server, MINUS, "prompt", tmp_path)
    vector = Vector.parse(apart, "vector").to_json()
    capture = {"hook": "resid_post", "layers": [int(page.input_value("#probe-layer"))], "positions": "sampled"}
    choice = asked(server, user(TEXT), capture=[capture | {"project": vector}])
    ((_, expected),) = choice["weir"]["scores"]["sites"].items()
    expected = np.array(expected)[:, 0]
    got = np.array([t["score"] for t in tokens])
    assert np.abs(got - expected).max() <= APART * np.abs(expected).max()


def test_a_new_chat_ends_the_reply_that_is_under_way(page):
    """It was an error of the page, which looked for a message to take back."""
    page.fill("#max-tokens", "200")
    page.fill("#text", TEXT)
    page.press("#text", "Enter")
    page.wait_for_selector(".token")
    page.click("#clear")
    page.wait_for_selector("#send:not([disabled])")
    assert page.locator("#messages li").count() == 0 and page.input_value("#text") == ""


def test_what_is_written_stays_text(page):
    say(page, "<img src=x onerror=document.title='hit'>")
    assert page.title() == "Weir"
    assert page.locator("#messages img").count() == 0


def test_errors_say_what_is_wrong(page):
    page.fill("#key", "wrong")
    page.dispatch_event("#key", "change")
    page.wait_for_selector("#error:has-text('401')")
    assert page.inner_text("#model") == "not connected"


def test_only_the_files_of_the_page(server):
    for path in ("/weir/../settings.py", "/weir/index.html", "/weir/page.py", "/weir/%2e%2e/page.py"):
        assert server.get(path).status_code == 404
    answer = server.get("/weir")
    assert "script-src 'self'" in answer.headers["content-security-policy"]
