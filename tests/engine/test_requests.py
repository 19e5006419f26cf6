"""Every way to make a request, each checked against transformers; one engine."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import (
    BOUND,
    SELECTORS,
    asking,
    frontend,
    ids_of,
    prompts,
    reached,
    same_rows,
    sampling,
    scheduler,
    tokens,
    verify,
)
from tests.support.measure import rel_err
from vllm_weir.patches import sampling_params as patches

pytestmark = pytest.mark.engine("default")
LAYERS = 4


def one(llm, prompt, params):
    (out,) = llm.generate(prompt, params, use_tqdm=False)
    return out


@pytest.mark.parametrize("seed", [7, None])
def test_each_of_n_sequences_has_its_own_rows(llm, truth, seed):
    """Without a seed vLLM gives all of them the same params object."""
    params, wanted = asking("all", LAYERS, n=5, temperature=1.0, seed=seed)
    outs = llm.generate(prompts([9, 20]), params, use_tqdm=False)
    for out in outs:
        assert sorted(c.index for c in out.outputs) == list(range(5))
        assert len({tuple(c.token_ids) for c in out.outputs}) > 1
        for completion in out.outputs:
            verify(out, wanted, truth, completion)
        first = min(out.outputs, key=lambda c: c.index)
        assert out.activations is first.activations


@pytest.mark.parametrize("length", [1, 2, 40])
def test_one_generated_token(llm, truth, length):
    for selector in SELECTORS:
        params, wanted = asking(selector, LAYERS, max_tokens=1)
        if reached(selector, length, 1):
            verify(one(llm, prompts([length]), params), wanted, truth)
            continue
        with pytest.raises(weir.WeirError, match="selects no row") as e:
            one(llm, prompts([length]), params)
        assert e.value.field == "capture[0].positions"
    params, _ = asking("sampled", LAYERS, max_tokens=1)
    assert one(llm, prompts([length]), params).activations.positions.tolist() == [length - 1]


def test_a_notebook_shows_the_texts_of_tokens(llm):
    """Pickles leave the tokenizer behind, and show ids and positions."""
    probe = weir.Probe("p", torch.linspace(-1, 1, 128), layer=1)
    asked = weir.params(sampling(3), capture=weir.Capture("resid_post", [0, 2]), probes=probe)
    out = one(llm, "w3 w7 w509 w1", asked)
    again = pickle.loads(pickle.dumps(out))  # noqa: S301
    for there, gone in ((out.scores, again.scores), (out.activations, again.activations)):
        assert "w509" in there._repr_html_() and "w509" not in gone._repr_html_()
    assert out.scores._repr_html_().count("<span") == 4 + 2 + 1  # the last token has no row; a legend
    assert ">[509]<" in again.activations._repr_html_()
    lens = one(llm, "w3 w7 w509 w1", weir.params(sampling(3), lens=weir.Lens(top_k=2))).lens
    assert ">w509<" in lens._repr_html_().replace("> ", ">") and lens._repr_html_().count("<td") == LAYERS * 6


def test_text_and_token_prompts(llm, truth):
    params, wanted = asking("all", LAYERS)
    outs = llm.generate(["w3 w7 w509 w1", "w9"], params, use_tqdm=False)
    assert [list(o.prompt_token_ids) for o in outs] == [[3, 7, 509, 1], [9]]
    for out in outs:
        verify(out, wanted, truth)
    mixed = llm.generate(["w5 w6", {"prompt_token_ids": [5, 6]}], params, use_tqdm=False)
    same_rows(mixed[0].activations, mixed[1].activations, 0.0)


def test_chat(llm, truth):
    params, wanted = asking("all", LAYERS)
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}w2"
    talk = [{"role": "user", "content": "w11 w12"}, {"role": "assistant", "content": "w13"}]
    (out,) = llm.chat([talk], params, use_tqdm=False, chat_template=template)
    assert list(out.prompt_token_ids) == [11, 12, 13, 2]
    verify(out, wanted, truth)


@pytest.mark.parametrize("selector", [{"token_ids": [511]}, {"token_ids": [511, 9999]}, {"not_token_ids": range(513)}])
def test_tokens_that_do_not_occur_give_no_rows(llm, truth, selector):
    params, wanted = asking(selector, LAYERS, max_tokens=1)
    out = one(llm, prompts([6]), params)
    verify(out, wanted, truth)
    for site in wanted:
        assert out.activations[site].shape == (0, truth.hidden_size)
        assert out.activations[site].dtype == torch.float32
    assert out.activations.positions.tolist() == []


@pytest.mark.parametrize(
    ("selector", "max_tokens", "field"),
    [
        *((s, 1, "") for s in (500, "300:", "6:", -90, [600, 700], "generated", {"token_ids": [515, 9999]})),
        *((s, 4, "") for s in (9, "9:", "-90:-6", [-7, 9])),
        ({"not_token_ids": list(range(515))}, 4, ".not_token_ids"),  # older vLLMs count an id too many
        (256, None, ""),  # max_model_len
        ("255:", 10**6, ""),
    ],
)
def test_selectors_that_select_nothing_are_refused(llm, truth, selector, max_tokens, field):
    """Of captures and of interventions, whatever else is asked; the engine goes on."""
    vector = torch.ones(truth.hidden_size)
    for weir_object, name in (
        ({"capture": [weir.Capture(), weir.Capture("resid_pre", 1, selector)]}, "capture[1]"),
        ({"interventions": [weir.Add(vector, 1), weir.Ablate(vector, 1, positions=selector)]}, "interventions[1]"),
        ({"interventions": weir.Add(0 * vector, 1, positions=selector)}, "interventions[0]"),
    ):
        for n in (1, 2):
            params = weir.params(sampling(max_tokens, n=n, temperature=float(n > 1)), **weir_object)
            with pytest.raises(weir.WeirError) as e:
                llm.generate(prompts([6]), params, use_tqdm=False)
            assert e.value.field.startswith(f"{name}.positions{field}"), e.value
    assert not llm.llm_engine.has_unfinished_requests() and not scheduler(llm).requests
    enough = weir.Capture(layers=1, positions=[500, 0, -9])
    assert one(llm, prompts([6]), weir.params(sampling(1), capture=enough)).activations.positions.tolist() == [0]


def test_the_last_position_that_has_a_row(llm, truth):
    """max_model_len bounds what a request without max_tokens generates."""
    for selector, max_tokens, P, at in ((254, None, 250, [254]), ("9:", 4, 7, [9]), ("generated", 2, 5, [5])):
        params, wanted = asking(selector, LAYERS, max_tokens=max_tokens)
        out = one(llm, prompts([P]), params)
        verify(out, wanted, truth)
        assert out.activations.positions.tolist() == at and at[-1] == P + len(out.outputs[0].token_ids) - 2
    assert out.activations.positions.tolist() == [5]


def test_what_every_request_undergoes_may_select_nothing_in_some(llm, truth):
    vector = torch.ones(truth.hidden_size)
    weir.set_global(llm, [weir.Add(vector, 1, positions="generated"), weir.Add(vector, 2, positions=[90, 1])])
    try:
        (short,) = llm.generate(prompts([1]), sampling(1), use_tqdm=False)
        assert short.receipt.steered == ({("resid_post", 1): 0}, {("resid_post", 2): 0})
        (longer,) = llm.generate(prompts([4]), sampling(3), use_tqdm=False)
        assert longer.receipt.steered == ({("resid_post", 1): 2}, {("resid_post", 2): 1})
    finally:
        weir.clear_global(llm)


def test_no_captures_at_all(llm):
    out = one(llm, prompts([6]), weir.params(sampling(), capture=[]))
    assert out.activations.sites == [] and len(out.outputs[0].token_ids) == 8
    assert one(llm, prompts([6]), sampling()).activations is None


def test_two_captures_of_one_site_merge(llm, truth):
    capture = [
        weir.Capture("resid_post", [1, 2], "0:4"),
        weir.Capture("resid_post", 1, [2, 3, 8, -1]),
        weir.Capture("post_block", 1, "generated"),
        weir.Capture("blocks.2.hook_resid_post", positions=[0]),
    ]
    out = one(llm, prompts([10]), weir.params(sampling(), capture=capture))
    wanted = {("resid_post", 1): ["0:4", [2, 3, 8, -1], "generated"], ("resid_post", 2): ["0:4", [0]]}
    verify(out, wanted, truth)
    for name in ("positions", "token_ids"):
        with pytest.raises(weir.WeirError, match=f"{name}_of"):
            getattr(out.activations, name)
    assert out.activations.positions_of("resid_post", 2).tolist() == [0, 1, 2, 3]


def test_as_many_selectors_as_a_request_may_have(llm, truth):
    """Every capture has positions of its own, so that every combination gets rows of its own."""
    from vllm_weir.schema.request import MAX_CAPTURES

    capture = [weir.Capture("resid_post", i % LAYERS, [i]) for i in range(MAX_CAPTURES)]
    params = weir.params(sampling(), capture=capture)
    params.extra_args["output_residual_stream"] = [0]
    out = one(llm, prompts([MAX_CAPTURES + 5]), params)
    wanted = {("resid_post", layer): [list(range(layer, MAX_CAPTURES, LAYERS))] for layer in range(LAYERS)}
    wanted["resid_post", 0].append("all")
    verify(out, wanted, truth)
    with pytest.raises(weir.WeirError) as e:
        weir.params(capture=[*capture, capture[0]])
    assert e.value.field == "capture"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", torch.float16, torch.float32, None])
def test_dtypes(llm, truth, dtype):
    capture = [weir.Capture("resid_post", 2, dtype=dtype), weir.Capture("resid_post", 1)]
    out = one(llm, prompts([12]), weir.params(sampling(), capture=capture))
    expected = torch.float32 if dtype is None else getattr(torch, str(dtype).removeprefix("torch."))
    assert out.activations["resid_post", 2].dtype == expected
    assert out.activations["resid_post", 1].dtype == torch.float32
    reference = truth.rows(ids_of(out)[:-1], [("resid_post", 2)])["resid_post", 2]
    error = (out.activations["resid_post", 2].float() - reference).abs()
    rounding = torch.finfo(expected).eps / 2 * reference.abs() + 2 * BOUND * reference.abs().max()
    assert bool((error <= rounding).all())
    assert "resid_post.2" in out.receipt.to_dict()["captured"]
    for name in ("resid_post.2", "resid_post[2]"):
        rows, array = out.activations[name], out.activations.numpy(name)
        assert rows is out.activations["resid_post", 2] and array.shape == (19, truth.hidden_size)
        assert array.dtype == ("float16" if expected == torch.float16 else "float32")
        assert torch.from_numpy(array).equal(rows.to(torch.from_numpy(array).dtype))


def test_before_and_after_are_the_same_without_interventions(llm, truth):
    params = weir.params(
        sampling(), capture=[weir.Capture("resid_post", before=True), weir.Capture("resid_pre", [0, 2], before=True)]
    )
    wanted = {("resid_post", layer): ["all"] for layer in range(LAYERS)}
    wanted |= {("resid_pre", 0): ["all"], ("resid_pre", 2): ["all"]}
    verify(one(llm, prompts([12]), params), wanted, truth)


def test_step_loop(llm, truth):
    engine, asked, done = llm.llm_engine, {}, {}
    for i, selector in enumerate(SELECTORS):
        params, asked[f"r-{i}"] = asking(selector, LAYERS)
        engine.add_request(f"r-{i}", {"prompt_token_ids": tokens(5 + 9 * i, i)}, params)
    while engine.has_unfinished_requests():
        for out in engine.step():
            if out.finished:
                done[out.request_id] = out
    assert done.keys() == asked.keys()
    for request_id, out in done.items():
        verify(out, asked[request_id], truth)


def test_step_loop_streams_partial_rows(llm, truth):
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    params, wanted = asking("all", LAYERS)
    params.output_kind = RequestOutputKind.CUMULATIVE
    engine.add_request("s", {"prompt_token_ids": tokens(20)}, params)
    seen = []
    while engine.has_unfinished_requests():
        for out in engine.step():
            assert out.receipt.complete == out.finished
            seen.append((len(out.activations.positions), len(out.outputs[0].token_ids)))
    assert seen == [(20 + g - 1, g) for g in range(1, 9)]
    verify(out, wanted, truth)


def test_a_stop_string_ends_the_rows_where_it_ends_the_tokens(llm, truth):
    plain = one(llm, prompts([15]), sampling(20))
    stop = f"w{plain.outputs[0].token_ids[6]}"
    params, wanted = asking("all", LAYERS, max_tokens=20, stop=[stop])
    out = one(llm, prompts([15]), params)
    assert out.outputs[0].finish_reason == "stop" and 0 < len(out.outputs[0].token_ids) < 20
    verify(out, wanted, truth)
    params, wanted = asking("all", LAYERS, max_tokens=20, stop_token_ids=[plain.outputs[0].token_ids[6]])
    out = one(llm, prompts([15]), params)
    assert out.outputs[0].finish_reason == "stop"
    verify(out, wanted, truth)


def test_prompt_logprobs_beside_a_capture(llm, truth):
    params, wanted = asking("generated", LAYERS, prompt_logprobs=1, logprobs=2)
    out = one(llm, prompts([40]), params)
    assert len(out.prompt_logprobs) == 40
    verify(out, wanted, truth)


def test_300_concurrent_requests_each_with_a_wish_of_its_own(llm, truth):
    asked, lengths = [], []
    for i in range(300):
        selector = [*SELECTORS, [i % 7, -2], f"{i % 5}::{1 + i % 3}"][i % 12]
        selector = selector if reached(selector, 1 + i * 7 % 40, 1 + i % 6) else "all"
        sites = {("resid_post", i % LAYERS), ("resid_post", i // 4 % LAYERS), ("resid_pre", i // 16 % LAYERS)}
        capture = [weir.Capture(hook, layer, selector) for hook, layer in sites]
        asked.append((weir.params(sampling(1 + i % 6), capture=capture), {site: [selector] for site in sites}))
        lengths.append(1 + i * 7 % 40)
    outs = llm.generate(prompts(lengths), [params for params, _ in asked], use_tqdm=False)
    for out, (_, wanted) in zip(outs, asked, strict=True):
        verify(out, wanted, truth)


def test_the_wire_form_as_a_json_string(llm, truth):
    wire = json.dumps({"v": 1, "capture": [{"hook": "resid_post", "layers": [1], "positions": "sampled"}]})
    out = one(llm, prompts([7]), sampling(extra_args={"weir": wire}))
    verify(out, {("resid_post", 1): ["sampled"]}, truth)


def test_save_and_load(llm, tmp_path):
    out = one(llm, prompts([7]), weir.params(sampling(), capture=weir.Capture("resid_post", positions="prompt")))
    path = out.activations.save(tmp_path / "rows.safetensors")
    same_rows(weir.Activations.load(path), out.activations, 0.0)


def test_the_lens_key(llm, truth):
    params = sampling(extra_args={"output_residual_stream": [2, 0]})
    out = one(llm, prompts([11]), params)
    rows, reference = out.activations["residual_stream"], truth.rows(ids_of(out)[:-1], [("resid_post", 0)])
    assert rows.shape == (2, 11 + 8 - 1, truth.hidden_size)
    for k, layer in enumerate([0, 2]):
        assert rel_err(rows[k], reference["resid_post", layer]) <= BOUND
    every = one(llm, prompts([3]), sampling(extra_args={"output_residual_stream": True}))
    assert every.activations["residual_stream"].shape[0] == LAYERS


def test_one_bad_request_of_a_list_leaves_nothing_behind(llm, truth):
    good, wanted = asking("all", LAYERS)
    bad = weir.params(sampling(), capture=weir.Capture("resid_post", layers=[LAYERS]))
    with pytest.raises(weir.WeirError) as e:
        llm.generate(prompts([5, 6, 7]), [good, good, bad], use_tqdm=False)
    assert e.value.field == "capture[0].layers"
    assert not llm.llm_engine.has_unfinished_requests() and len(frontend(llm).store) == 0
    verify(one(llm, prompts([5]), good), wanted, truth)


def test_the_engine_copies_params_the_quick_way(llm, monkeypatch):
    """Of requests with Weir's keys; of others vLLM's own way."""
    copied = []
    real = patches.plain_copy
    monkeypatch.setattr(patches, "plain_copy", lambda value: copied.append(value) or real(value))
    params = sampling(1, extra_args={"other": 1})
    llm.generate(prompts([5]), params, use_tqdm=False)
    assert not copied
    llm.generate(prompts([5]), weir.params(params, capture=weir.Capture(layers=[1])), use_tqdm=False)
    assert any(isinstance(value, dict) and "weir" in value for value in copied)
