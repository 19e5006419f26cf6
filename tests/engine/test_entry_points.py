"""Ways into one engine besides plain `LLM.generate`: grammars, chats with tools, priorities, new weights."""

from __future__ import annotations

import re

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import assert_nothing_is_held, changed, directory, oracle, prompts, sampling, tokens, verify
from tests.engine.probe_cases import check_greedy
from tests.support.engines import get_llm
from tests.support.measure import rel_err

pytestmark = pytest.mark.engine
BOUND = 1e-5
LAYERS = 4
EVERY = {("resid_post", layer): ["all"] for layer in range(LAYERS)}
CAPTURE = weir.Capture("resid_post")
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.description }} {% endfor %}"
    "{% for message in messages %}{{ message.content }} {% endfor %}w1"
)
TOOL = {
    "type": "function",
    "function": {"name": "w20", "description": "w30 w31 w32", "parameters": {"type": "object", "properties": {}}},
}


def engine(root):
    settings = {"weir": {"max_programs": 2}}
    return get_llm(directory(root), block_size=32, scheduling_policy="priority", additional_config=settings)


def vector(seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(128, generator=torch.Generator().manual_seed(seed))


def grammar(**structure):
    from vllm.sampling_params import StructuredOutputsParams

    return sampling(8, structured_outputs=StructuredOutputsParams(**structure))


def check_steered(out, n, truth, first=9):
    """Compare the rows of the n-th request, steered from position `first` on, with transformers'."""
    ids = [*out.prompt_token_ids, *out.outputs[0].token_ids][:-1]
    rows, _ = truth.points.steer(ids, "resid_post", 1, vector(n), list(range(first, len(ids))))
    for site in out.outputs[0].activations.sites:
        assert rel_err(out.outputs[0].activations[site], rows[tuple(site)]) <= BOUND, (out.request_id, site)


def test_structured_outputs(root):
    """Grammars hold, rows and steering are those of the tokens that came out, and neighbours do not notice."""
    llm, truth = engine(root), oracle(directory(root))
    structures = [
        ({"regex": "(w3 ?|w7 ?){8,20}"}, "(w3|w7)+"),
        ({"choice": ["w3w4w5w6w7w8w9w10"]}, "w3w4w5w6w7w8w9w10?"),
        ({"grammar": 'root ::= ("w3" | "w4")+'}, "(w3|w4)+"),
    ]
    plain = weir.params(sampling(8), capture=CAPTURE)
    text = {"prompt_token_ids": tokens(20)}
    (alone,) = llm.generate(text, plain, use_tqdm=False)
    asked = [weir.params(grammar(**structure), capture=CAPTURE) for structure, _ in structures]
    add = [weir.params(one, interventions=weir.Add(vector(), 1, positions="generated")) for one in asked]
    *outs, beside = llm.generate([text] * 7, [*asked, *add, plain], use_tqdm=False)
    for out, (_, pattern) in zip(outs, structures * 2, strict=True):
        assert re.fullmatch(pattern, out.outputs[0].text.replace(" ", "")), out.outputs[0].text
    for free, steered in zip(outs[:3], outs[3:], strict=True):
        verify(free, EVERY, truth)
        check_steered(steered, 0, truth, first=20)
    assert beside.outputs[0].token_ids == alone.outputs[0].token_ids
    verify(beside, EVERY, truth)
    del outs, out, beside, alone, free, steered
    assert_nothing_is_held(llm)


def test_chat_with_tools(root):
    """Tools and messages make a prompt, whose rows come back; each turn of a batch is its own."""
    llm, truth = engine(root), oracle(directory(root))
    chats = [[{"role": "user", "content": "w5 w6"}], [{"role": "user", "content": "w7"}]]
    asked = weir.params(sampling(6), capture=CAPTURE)
    add = weir.params(asked, interventions=weir.Add(vector(), 1))
    options = dict(chat_template=TEMPLATE, add_generation_prompt=False, tools=[TOOL], use_tqdm=False)
    for chat, out in zip(chats, llm.chat(chats, asked, **options), strict=True):
        words = ["w30", "w31", "w32", *chat[0]["content"].split(), "w1"]
        assert out.prompt_token_ids == [int(word[1:]) for word in words]
        verify(out, EVERY, truth)
    (out,) = llm.chat(chats[:1], add, **options)
    check_steered(out, 0, truth, first=0)
    del out
    assert_nothing_is_held(llm)


def test_priorities(root):
    """Steered requests that wait for the device tables go by priority, as vLLM's own queue does."""
    llm = engine(root)
    llm.llm_engine.step()  # the tables learn that earlier requests have gone
    given = {"first": 0, "second": 0, "d": 3, "c": 2, "a": -1, "b": 2, "e": 9}
    for n, (name, priority) in enumerate(given.items()):
        params = weir.params(sampling(4), capture=CAPTURE, interventions=weir.Add(vector(n), 1, positions="generated"))
        llm.llm_engine.add_request(name, {"prompt_token_ids": tokens(9, n)}, params, priority=priority)
    done = []
    while llm.llm_engine.has_unfinished_requests():
        done += [out for out in llm.llm_engine.step() if out.finished]
    assert [out.request_id for out in done] == ["first", "second", "a", "c", "b", "d", "e"]
    truth = oracle(directory(root))
    for out in done:
        check_steered(out, list(given).index(out.request_id), truth)
    del done, out
    assert_nothing_is_held(llm)


def check_weights(llm, model_dir) -> None:
    """Rows, derived points, a lens and steering are those of these weights."""
    llm.reset_prefix_cache()  # as vLLM asks for when weights are replaced
    truth = oracle(model_dir)
    everything = [weir.Capture(hook) for hook in ("resid_post", "attn_out", "q_rot", "mlp_post", "pattern", "embed")]
    asked = weir.params(sampling(5), capture=everything)
    for out in llm.generate(prompts((20, 3)), asked, use_tqdm=False):
        ids = [*out.prompt_token_ids, *out.outputs[0].token_ids]
        reference = truth.rows(ids[:-1]) | truth.points.points(ids[:-1])[0]
        for site in out.activations.sites:
            assert rel_err(out.activations[site], reference[tuple(site)][: len(ids) - 1]) <= BOUND, site
    asked = weir.params(sampling(5), lens=weir.Lens(layers=[LAYERS - 1], top_k=1))
    (out,) = llm.generate(prompts((20,)), asked, use_tqdm=False)
    likeliest = out.lens[LAYERS - 1].token_ids[-5:, 0].tolist()
    assert likeliest == list(out.outputs[0].token_ids), "greedy decoding takes what the last block says"
    ids = [*out.prompt_token_ids, *likeliest][:-1]
    check_greedy(likeliest, truth.logits(ids)[-5:])
    add = weir.params(sampling(5), capture=CAPTURE, interventions=weir.Add(vector(), 1))
    (out,) = llm.generate(prompts((20,)), add, use_tqdm=False)
    check_steered(out, 0, truth, first=0)


def test_reloaded_weights(root):
    """From a checkpoint, and in place as a trainer does: what taps read and write is the new model's."""
    llm, other = engine(root), changed(root)
    weir.register(llm, "kept", vector())
    try:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        check_weights(llm, other)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directory(root))})
        check_weights(llm, directory(root))

        asked = weir.params(sampling(1), capture=[weir.Capture("resid_pre", 0), weir.Capture("attn_in", 0)])
        before = llm.generate(prompts((20,)), asked, use_tqdm=False)[0].activations

        def halve(model):  # a CPU's matrices are packed when they are loaded; norms are not
            model.model.layers[0].input_layernorm.weight.data.mul_(0.5)

        llm.apply_model(halve)
        llm.reset_prefix_cache()
        after = llm.generate(prompts((20,)), asked, use_tqdm=False)[0].activations
        assert torch.equal(after["resid_pre", 0], before["resid_pre", 0])
        assert torch.equal(after["attn_in", 0], before["attn_in", 0] / 2)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directory(root))})
        assert list(weir.list_vectors(llm)) == ["kept"]
    finally:
        weir.unregister(llm, "kept")
    del before, after
    assert_nothing_is_held(llm)


def crowd(llm, count: int = 7) -> None:
    """Steered requests, of which all but two wait for the device tables, after one step."""
    llm.llm_engine.step()
    for n in range(count):
        params = weir.params(sampling(8), capture=CAPTURE, interventions=weir.Add(vector(n), 1, positions="generated"))
        llm.llm_engine.add_request(f"r{n}", {"prompt_token_ids": tokens(9, n)}, params)
    llm.llm_engine.step()


def finished(llm) -> list:
    done: list = []
    for _ in range(200):
        if not llm.llm_engine.has_unfinished_requests():
            return done
        done += [out for out in llm.llm_engine.step() if out.finished]
    raise AssertionError("requests do not end")


def test_a_sleep_aborts_what_is_under_way(root):
    """Requests that wait for the device tables as well; those that come after the wake-up have room."""
    llm = engine(root)
    crowd(llm)
    llm.sleep(level=0, mode="abort")
    llm.wake_up(tags=["scheduling"])
    # In one process vLLM ends them in the engine alone, and the caller has to give them up.
    llm.llm_engine.abort_request([f"r{n}" for n in range(7)])
    assert not llm.llm_engine.has_unfinished_requests()
    assert_nothing_is_held(llm)
    crowd(llm, 3)
    assert [out.outputs[0].finish_reason for out in finished(llm)] == ["length"] * 3
    assert_nothing_is_held(llm)


def test_a_sleep_keeps_what_is_under_way(root):
    """They go on where they were, with their rows and their steering."""
    llm, truth = engine(root), oracle(directory(root))
    crowd(llm)
    llm.sleep(level=0, mode="keep")
    llm.wake_up(tags=["scheduling"])
    done = finished(llm)
    assert len(done) == 7
    for out in done:
        check_steered(out, int(out.request_id[1:]), truth)
    del done, out
    assert_nothing_is_held(llm)


def test_streamed_input_is_refused(root):
    """vLLM's sessions whose prompt grows while they run; the message says what to send instead."""
    llm = engine(root)
    processor = llm.llm_engine.input_processor
    asked = weir.params(sampling(2), capture=CAPTURE)
    tasks = llm.llm_engine.get_supported_tasks()
    request = processor.process_inputs(
        "r", {"prompt_token_ids": tokens(9)}, asked, supported_tasks=tasks, resumable=True
    )
    processor.assign_request_id(request)
    with pytest.raises(weir.WeirError, match="send the whole prompt"):
        llm.llm_engine.output_processor.add_request(request, None, None, 0)
    assert_nothing_is_held(llm)
