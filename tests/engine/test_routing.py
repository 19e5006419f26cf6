"""`routing`: the experts that routers choose, held against transformers' and vLLM's routers."""

from __future__ import annotations

import asyncio
import copy
from functools import partial

import numpy as np
import pytest
import torch

import vllm_weir as weir
from tests.conformance.engine import on_cpu
from tests.conformance.oracle import Oracle
from tests.conformance.zoo import ZOO
from tests.conformance.zoo.build import build
from tests.conformance.zoo.loader import LOAD_FORMAT
from tests.engine.common import BOUND, assert_nothing_is_held, directory, prompts, sampling
from tests.engine.serving import API_KEY, COMPLETIONS, WEIR, choices, events, post, rows_of, running
from tests.support.engines import async_llm, close_all, get_llm
from tests.support.machine import GIB, binding, engine_processes, inductor, memory, needs, ranks
from tests.support.measure import rel_err
from tests.support.named import ENGINES
from vllm_weir.client.response_fields import array_of

pytestmark = pytest.mark.engine
THOROUGH = pytest.mark.thorough
LENGTHS = (40, 7, 18)
GENERATED = 6


def engine(root, architecture, **more):
    entry = ZOO[architecture]
    options = dict(block_size=32, max_model_len=128, skip_tokenizer_init=True)
    return get_llm(build(entry, root / architecture), **options | on_cpu(entry) | entry.engine | more)


def asked(routing=True, generated=GENERATED, **more):
    return weir.params(sampling(generated, detokenize=False, **more), routing=routing)


def sequence(out, completion=0):
    return [*out.prompt_token_ids, *out.outputs[completion].token_ids][:-1]


FACTORS = {"DeepseekV3ForCausalLM": 1.7}
"""What vLLM multiplies the experts' sum with, and transformers their weights."""


def check(found, weights, rows, layers, start=0):
    """What came back is what transformers' experts were given, in any order."""
    for layer in range(layers):
        if ("expert_ids", layer) not in rows:
            assert not found[:, layer].any() and not weights[:, layer].any()
            continue
        ids, scores = rows["expert_ids", layer].long()[start:], rows["expert_weights", layer][start:]
        order, own = ids.argsort(-1), torch.from_numpy(found[:, layer].astype(np.int64)).argsort(-1)
        got = torch.from_numpy(found[:, layer].astype(np.int64)).gather(-1, own)
        assert torch.equal(got, ids.gather(-1, order)), (layer, (got != ids.gather(-1, order)).sum())
        scores = scores.gather(-1, ids) if scores.shape != ids.shape else scores  # some return one for each expert
        off = torch.from_numpy(weights[:, layer]).gather(-1, own) - scores.gather(-1, order)
        assert off.abs().max() <= 1e-4 * scores.abs().max(), layer


@pytest.mark.parametrize(
    "architecture",
    [
        "MixtralForCausalLM",
        pytest.param("Qwen3MoeForCausalLM", marks=THOROUGH),
        "DeepseekV3ForCausalLM",
        pytest.param("GptOssForCausalLM", marks=THOROUGH),
        pytest.param("OlmoeForCausalLM", marks=THOROUGH),
    ],
)
def test_experts_are_those_of_transformers(root, architecture):
    """Prompts of several lengths in one batch, neighbours that ask for nothing, and prefix hits in the second round."""
    llm = engine(root, architecture)
    oracle = Oracle(root / architecture)
    plain = sampling(GENERATED, detokenize=False)
    each = [asked(weir.Routing(weights=True)), plain, asked(weir.Routing(weights=True, prompt_start=5))]
    for _ in range(2):
        outs = llm.generate(prompts(LENGTHS), each, use_tqdm=False)
        assert outs[1].outputs[0].routed_experts is None and outs[1].outputs[0].routing_weights is None
        for out, start in ((outs[0], 0), (outs[2], 5)):
            ids = sequence(out)
            found, weights = out.outputs[0].routed_experts, out.outputs[0].routing_weights
            assert found.dtype == np.uint8 and weights.dtype == np.float32
            assert found.shape == weights.shape == (len(ids) - start, 4, 2)
            check(found, weights * FACTORS.get(architecture, 1), oracle.points(ids)[0], 4, start)


@pytest.mark.parametrize(
    "architecture",
    [
        "PhiMoEForCausalLM",
        *(pytest.param(name, marks=THOROUGH) for name in ("DeepseekV2ForCausalLM", "Glm4MoeForCausalLM")),
    ],
)
def test_experts_are_those_of_vllms_router(root, architecture):
    """To the bit, and in the router's order, for what a router returned while the request ran."""
    own = {} if ZOO[architecture].oracle else {"load_format": LOAD_FORMAT, "trust_remote_code": True}
    llm = engine(root, architecture, enable_prefix_caching=False, **own)
    calls: dict[int, list] = {}

    def watch(model):
        routers = {m.layer_id: m.router for m in model.modules() if hasattr(m, "layer_id") and hasattr(m, "router")}
        for layer, router in routers.items():
            router._compute_routing = partial(note, router._compute_routing, calls.setdefault(layer, []))

    llm.apply_model(watch)
    try:
        (out,) = llm.generate(prompts((40,)), asked(weir.Routing(weights=True)), use_tqdm=False)
    finally:
        close_all()  # the engine's routers are changed
    assert calls
    for layer, made in calls.items():
        ids, weights = (torch.cat(parts) for parts in zip(*made, strict=True))
        assert np.array_equal(out.outputs[0].routed_experts[:, layer], ids.numpy())
        assert np.array_equal(out.outputs[0].routing_weights[:, layer], weights.float().numpy())


def note(compute, calls, *arguments, **options):
    weights, ids = compute(*arguments, **options)
    calls.append((ids.clone(), weights.clone()))
    return weights, ids


def test_what_else_a_request_asks(root):
    """Captures, probes and several sequences beside it; a copy keeps it; nothing is held afterwards."""
    llm = get_llm(directory(root, "mixtral"), block_size=32)
    params = sampling(8, n=3, temperature=1.0, seed=5)
    both = weir.params(params, routing=True, capture=[weir.Capture(), weir.Capture("expert_ids", dtype=None)])
    (out,) = llm.generate(prompts((20,)), both, use_tqdm=False)
    for number, completion in enumerate(out.outputs):
        found = completion.routed_experts
        assert found.shape == (27, 3, 2) and completion.routing_weights is None
        for layer in range(3):
            chosen = completion.activations["expert_ids", layer]
            assert torch.equal(chosen.sort(-1).values, torch.from_numpy(np.sort(found[:, layer]).astype(np.int64)))
        assert np.array_equal(copy.deepcopy(completion).routed_experts, found), number
    assert "routing" not in weir.params(both, routing=False).extra_args["weir"]
    del out, completion, chosen, found
    assert_nothing_is_held(llm)


SCARCE = ENGINES["scarce"].arguments
TWO = [needs(engine_processes, memory(3 * GIB), ranks(2)), THOROUGH]
WAYS = [
    pytest.param(SCARCE, id="thrown out"),
    pytest.param(dict(enforce_eager=False, in_process=False, block_size=32), id="compiled", marks=needs(inductor)),
    pytest.param(dict(block_size=32, pipeline_parallel_size=2), id="stages", marks=TWO),
    pytest.param(dict(block_size=32, tensor_parallel_size=2), id="ranks", marks=TWO),
]


@pytest.mark.parametrize("arguments", WAYS)
def test_however_the_engine_runs(root, tmp_path, arguments):
    """Preempted requests, a compiled model, pipeline stages and tensor-parallel ranks: transformers' choices."""
    env = {"VLLM_CACHE_ROOT": str(tmp_path)} if "enforce_eager" in arguments else None
    if "parallel" in str(arguments):
        env = {"VLLM_CPU_OMP_THREADS_BIND": binding(2)}
    llm = get_llm(directory(root, "mixtral"), **arguments, env=env)
    oracle = Oracle(directory(root, "mixtral"))
    params = asked(weir.Routing(weights=True), generated=100 if arguments is SCARCE else GENERATED)
    outs = llm.generate(prompts((30, 31, 40, 33, 32, 35)), params, use_tqdm=False)
    for out in outs:
        ids = sequence(out)
        assert out.outputs[0].routed_experts.shape == (len(ids), 3, 2)
        check(out.outputs[0].routed_experts, out.outputs[0].routing_weights, oracle.points(ids)[0], 3)


def test_stop_strings_cut_it_as_tokens(root):
    llm = get_llm(directory(root, "mixtral"), block_size=32)
    (whole,) = llm.generate(prompts((12,)), weir.params(sampling(16), routing=True), use_tqdm=False)
    stop = whole.outputs[0].text[3:7]
    (cut,) = llm.generate(prompts((12,)), weir.params(sampling(16, stop=stop), routing=True), use_tqdm=False)
    tokens = len(cut.outputs[0].token_ids)
    assert tokens < 16
    assert np.array_equal(cut.outputs[0].routed_experts, whole.outputs[0].routed_experts[: 12 + tokens - 1])


@needs(engine_processes)
def test_streams_have_it_at_their_end(root):
    async def run():
        from vllm.sampling_params import RequestOutputKind

        engine = async_llm(directory(root, "mixtral"), block_size=32)
        try:
            found = {}
            for kind in (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY):
                params = weir.params(sampling(8, output_kind=kind), routing=True)
                got = [out async for out in engine.generate(prompts((33,))[0], params, str(kind))]
                assert all(out.outputs[0].routed_experts is None for out in got[:-1])
                found[kind] = got[-1].outputs[0].routed_experts
            assert len({array.tobytes() for array in found.values()}) == 1
            assert found[kind].shape == (40, 3, 2)
        finally:
            engine.shutdown(0)

    asyncio.run(run())


@needs(engine_processes)
def test_over_http(root, tmp_path):
    """vLLM's own field of a choice, streamed or not, on each route, and what the client makes of it."""
    llm = get_llm(directory(root, "mixtral"), block_size=32)
    text, common = "Tom went to the", {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    params = weir.params(sampling(6), routing=weir.Routing(weights=True))
    (out,) = llm.generate([text], params, use_tqdm=False)
    wanted, weights = out.outputs[0].routed_experts, out.outputs[0].routing_weights
    capture = weir.Capture("resid_post", 1, "all")
    (captured,) = llm.generate([text], weir.params(sampling(6), capture=capture), use_tqdm=False)
    close_all()
    body = {"prompt": text, "weir": {"v": 1, "routing": {"weights": True}}, **common}
    model, more = (
        str(directory(root, "mixtral")),
        ("--enable-scale-out", "--chat-template", "{{ messages[0].content }}"),
    )
    with running(tmp_path / "log", WEIR, *more, model=model, forked=True) as http:
        (choice,) = post(http, COMPLETIONS, **body)["choices"]
        assert np.array_equal(array_of(choice["routed_experts"]), wanted)
        assert np.array_equal(array_of(choice["weir"]["routing_weights"]), weights)
        *parts, last = choices(events(http, COMPLETIONS, **body))
        assert np.array_equal(array_of(last["routed_experts"]), wanted) and "routed_experts" not in last["weir"]
        assert not any(part.get("routed_experts") for part in parts)
        extras = {"extra_args": {"weir": {"v": 1, "routing": True}}}
        generate = {"token_ids": out.prompt_token_ids, "sampling_params": common | extras}
        answer = http.post("/inference/v1/generate", json=generate)
        assert answer.status_code == 200, answer.text
        assert np.array_equal(array_of(answer.json()["choices"][0]["routed_experts"]), wanted)
        extras["extra_args"]["weir"] = body["weir"]
        answer = http.post("/inference/v1/generate", json=generate | {"sampling_params": common | extras})
        assert np.array_equal(array_of(answer.json()["choices"][0]["weir"]["routing_weights"]), weights)
        streamed = generate | {"sampling_params": common | extras, "stream": True}
        assert "routing.weights" in http.post("/inference/v1/generate", json=streamed).text
        rows_ride_on_generated_tokens(http, out.prompt_token_ids, captured.outputs[0], tmp_path)
        client = weir.Client(str(http.base_url), api_key=API_KEY)
        done = client.generate(text, routing=weir.Routing(weights=True), **common)
        assert np.array_equal(done.routed_experts, wanted) and np.array_equal(done.routing_weights, weights)
        *_, chunk = client.stream(text, routing=True, **common)
        assert np.array_equal(chunk.result.routed_experts, wanted) and chunk.result.routing_weights is None
        chat = client.chat([{"role": "user", "content": text}], routing=True, **common)
        assert chat.routed_experts.shape == (len(chat.prompt_token_ids) + 5, 3, 2)


def rows_ride_on_generated_tokens(http, prompt_ids, captured, folder):
    """On ``/inference/v1/generate`` each choice has Weir's object, with rows and receipt; a wrong field is named."""

    def answer(wish, **sampled):
        common = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "extra_args": {"weir": wish, "mine": 1}}
        asked = {"token_ids": prompt_ids, "sampling_params": common | sampled}
        return http.post("/inference/v1/generate", json=asked)

    wish = {"v": 1, "capture": [{"hook": "resid_post", "layers": [1], "positions": "all"}]}
    told = answer(wish, n=2, temperature=1, top_k=1).json()
    assert [choice["index"] for choice in told["choices"]] == [0, 1] and told["usage"]["completion_tokens"] == 12
    for choice in told["choices"]:
        assert choice["token_ids"] == list(captured.token_ids) and choice["weir"]["receipt"]["complete"]
        rows = rows_of(http, choice, folder)
        assert torch.equal(rows.positions, captured.activations.positions)
        assert rel_err(rows["resid_post", 1], captured.activations["resid_post", 1]) < BOUND
    wish["capture"][0]["layers"] = [99]
    refused = answer(wish)
    assert refused.status_code == 400 and "block 99" in refused.text, refused.text
    assert answer({"v": 1, "captures": []}).status_code == 400
    assert (
        "weir"
        not in http.post(
            "/inference/v1/generate", json={"token_ids": prompt_ids, "sampling_params": {"max_tokens": 2}}
        ).json()["choices"][0]
    )


def test_models_without_experts_refuse_it(root):
    llm = get_llm(directory(root), block_size=32)
    with pytest.raises(weir.WeirError, match="no experts to choose from") as e:
        llm.generate(prompts((4,)), weir.params(sampling(), routing=True), use_tqdm=False)
    assert e.value.field == "routing"


def test_a_start_beyond_the_prompt_is_refused(root):
    llm = get_llm(directory(root, "mixtral"), block_size=32)
    with pytest.raises(weir.WeirError, match="the prompt has 4 tokens") as e:
        llm.generate(prompts((4,)), asked(weir.Routing(prompt_start=5)), use_tqdm=False)
    assert e.value.field == "routing.prompt_start"
