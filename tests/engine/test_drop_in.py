"""`vllm_weir.LLM` and `AsyncLLM`: row j is the row that output token j was sampled from."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import pytest
import vllm

import vllm_weir as weir
from tests.engine.common import BOUND, directory, oracle, prompts, sampling
from tests.support.engines import DEFAULTS, EAGER, environment, quick_processes, quick_start, shut_down
from tests.support.machine import engine_processes, needs
from tests.support.measure import rel_err

pytestmark = pytest.mark.engine
CLOSE_OTHERS = True
IN_PROCESS = EAGER | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@contextlib.contextmanager
def engine(model_dir, layers="all", **arguments):
    options = DEFAULTS | arguments
    with environment(IN_PROCESS), quick_start():
        llm = weir.LLM(str(model_dir), layers, options.pop("dtype"), **options)  # by place, as in vllm-probe-hook
    try:
        yield llm
    finally:
        shut_down(llm)
        del llm
        gc.collect()


def check(out, truth, layers, completion=None, decode="all", prefill=None):
    """`decode`, `prefill`: "all", "last" or None for an empty dict."""
    holder = completion or out
    completion = completion or out.outputs[0]
    P, G = len(out.prompt_token_ids), len(completion.token_ids)
    reference = truth.rows((list(out.prompt_token_ids) + list(completion.token_ids))[:-1])
    assert holder.hidden is holder.hidden_states and holder.prefill_hidden is holder.prefill_hidden_states
    for found, kind, rows in (
        (holder.hidden_states, decode, slice(P - 1, P + G - 1)),
        (holder.prefill_hidden_states, prefill, slice(0, P)),
    ):
        assert list(found) == (list(layers) if kind else [])
        for layer, got in found.items():
            expected = reference["resid_post", layer][rows]
            expected = expected[-1:] if kind == "last" else expected
            assert got.shape == expected.shape
            assert rel_err(got, expected) <= BOUND


def test_two_instances_in_one_process_and_every_argument(root):
    llama, gpt2 = directory(root), directory(root, "gpt2")
    with engine(llama) as a, engine(gpt2, [3, 1], include_prefill=True, last_decode_token=True) as b:
        said = "vllm-probe-hook's interface to vLLM: hidden states of layers (1, 3), prefill and decode)"
        assert repr(b) == f"weir.LLM({str(gpt2)!r}, {said}"
        for _ in range(2):
            for out in a.generate(prompts([5, 1, 30]), sampling(7), use_tqdm=False):
                check(out, oracle(llama), range(4))
            for out in b.generate(prompts([5, 1, 30]), sampling(7), use_tqdm=False):
                check(out, oracle(gpt2), [1, 3], decode="last", prefill="all")
        (out,) = a.generate(prompts([9]), sampling(6, n=3, temperature=1.0, seed=1), use_tqdm=False)
        for completion in out.outputs:
            check(out, oracle(llama), range(4), completion)
        (out,) = a.generate(prompts([9]), sampling(1), use_tqdm=False)
        check(out, oracle(llama), range(4))
        (out,) = a.chat(
            [{"role": "user", "content": "w5 w6"}],
            sampling(3),
            use_tqdm=False,
            chat_template=TEMPLATE,
        )
        check(out, oracle(llama), range(4))
        (out,) = a.generate("w5 w6", use_tqdm=False)
        assert out.hidden_states[0].shape[0] == len(out.outputs[0].token_ids)

        params = sampling(4)
        a.generate(prompts([3]), params, use_tqdm=False)
        assert params.extra_args is None
        own = weir.params(params, capture=weir.Capture("resid_pre", 2, "prompt"))
        outs = a.generate(prompts([3, 8]), [own, params], use_tqdm=False)
        assert outs[0].activations["resid_pre", 2].shape[0] == 3
        for out in outs:
            check(out, oracle(llama), range(4))
        with pytest.raises(weir.WeirError):
            a.generate(prompts([3]), {"max_tokens": 3}, use_tqdm=False)
        a.remove_hooks()
        (out,) = a.generate(prompts([3]), params, use_tqdm=False)
        assert out.hidden_states == out.prefill_hidden_states == {} and out.activations is None
        with pytest.raises(weir.WeirError) as e:
            weir.LLM(str(llama), layers=[-1])
        assert e.value.field == "layers"


def test_every_way_to_ask_carries_hidden_states(root):
    """Requests that are queued first; vLLM's arguments by place; engine arguments as an object."""
    from vllm.engine.arg_utils import EngineArgs

    llama = directory(root)
    with environment(IN_PROCESS), quick_start():
        llm = weir.LLM.from_engine_args(EngineArgs(model=str(llama), **DEFAULTS))
    try:
        chat = [{"role": "user", "content": "w5 w6"}]
        llm.enqueue(prompts([5, 9]), [sampling(3), sampling(6)], use_tqdm=False)
        if hasattr(vllm.LLM, "enqueue_chat"):
            llm.enqueue_chat(chat, sampling(4), use_tqdm=False, chat_template=TEMPLATE)
        queued = llm.wait_for_completion(use_tqdm=False)
        assert len(queued) == 2 + hasattr(vllm.LLM, "enqueue_chat")
        for out in [*queued, *llm.chat(chat, sampling(3), False, None, chat_template=TEMPLATE)]:
            check(out, oracle(llama), range(4))
        for wrong in ({"max_tokens": 3}, [sampling(3), {"max_tokens": 3}]):
            with pytest.raises(weir.WeirError, match="sampling_params: expected SamplingParams, got dict"):
                llm.generate(prompts([3, 4]), wrong, use_tqdm=False)
    finally:
        shut_down(llm)
        del llm
        gc.collect()


@pytest.mark.parametrize(
    ("layers", "arguments", "decode", "prefill"),
    [
        (["all"], {"include_decode": False, "include_prefill": True}, None, "all"),
        ([2], {"include_decode": False, "last_prefill_token": True}, None, "last"),
        (0, {"include_decode": False, "last_decode_token": True, "last_prefill_token": True}, "last", "last"),
        ("all", {"include_decode": False}, None, None),
    ],
    ids=["prefill", "last-prefill", "last-both", "nothing"],
)
def test_arguments(root, layers, arguments, decode, prefill):
    model_dir = directory(root)
    expected = {"['all']": range(4), "all": range(4), "[2]": [2], "0": [0]}[str(layers)]
    with engine(model_dir, layers, **arguments) as llm:
        for out in llm.generate(prompts([5, 1, 30]), sampling(5), use_tqdm=False):
            check(out, oracle(model_dir), expected, decode=decode, prefill=prefill)


def test_rows_that_were_dropped_leave_the_others_where_they_are(root):
    """Row j stays the row that token j was sampled from, whatever the host buffer had no room for."""
    llama = directory(root)
    room = {"overflow": "drop", "buffer_bytes": 1 << 18, "host_bytes": 1 << 18}
    with engine(llama, include_prefill=True, additional_config={"weir": room}) as llm:
        outs = llm.generate(prompts([30, 9, 40] * 6), sampling(40), use_tqdm=False)
    lost = 0
    for out in outs:
        P, ids = len(out.prompt_token_ids), list(out.prompt_token_ids) + list(out.outputs[0].token_ids)
        reference = oracle(llama).rows(ids[:-1])
        for layer in range(4):
            for got, first in ((out.hidden_states[layer], P - 1), (out.prefill_hidden_states[layer], 0)):
                expected = reference["resid_post", layer][first : P if first == 0 else None]
                gone = got.isnan().any(1)
                assert got.shape == expected.shape and got[gone].isnan().all()
                assert rel_err(got[~gone], expected[~gone]) <= BOUND if not gone.all() else True
                lost += int(gone.sum())
        at = out.activations.positions_of("resid_post", 0).tolist()
        kept = [p for p in range(P, len(ids) - 1) if not out.hidden_states[0][p - P + 1].isnan().any()]
        assert kept == [p for p in at if p >= P]
    assert lost and any(out.receipt.dropped for out in outs)


def test_flags_are_true_or_false():
    for name in ("include_prefill", "include_decode", "last_prefill_token", "last_decode_token"):
        with pytest.raises(weir.WeirError, match=f"{name}: expected True or False"):
            weir.LLM("no model is looked for", **{name: "no"})


@pytest.mark.thorough
@needs(engine_processes)
def test_async(root):
    model_dir = directory(root)

    async def main():
        with quick_processes():
            llm = weir.AsyncLLM(str(model_dir), [1, 2], include_prefill=True, **DEFAULTS)
        try:

            async def one(prompt, name):
                outs = [out async for out in llm.generate(prompt, sampling(10), name)]
                assert all(len(o.hidden_states[1]) == len(o.outputs[0].token_ids) for o in outs)
                return outs[-1]

            outs = await asyncio.gather(*[one(p, f"r{i}") for i, p in enumerate(prompts([6, 1, 40]))])
            async for out in llm.generate(prompts([6])[0], sampling(200), "gone"):
                await llm.abort("gone")
            assert len(out.outputs[0].token_ids) < 200
            llm.remove_hooks()
            async for plain in llm.generate(prompts([6])[0], sampling(2)):
                assert plain.hidden_states == {}
        finally:
            llm.shutdown()
        return outs

    for out in asyncio.run(main()):
        check(out, oracle(model_dir), [1, 2], prefill="all")
