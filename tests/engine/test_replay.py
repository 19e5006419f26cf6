"""`Replay`: experts that routers have to choose, held against transformers with the same experts forced on it."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch

import vllm_weir as weir
from tests.conformance.oracle import Oracle
from tests.conformance.zoo.loader import LOAD_FORMAT
from tests.engine.common import BOUND, assert_nothing_is_held, directory, prompts, sampling
from tests.engine.serving import API_KEY, COMPLETIONS, WEIR, post, running
from tests.engine.test_routing import SCARCE, TWO, engine, sequence
from tests.support.drafter import SPECULATIVE, KnownDrafter
from tests.support.engines import close_all, get_llm
from tests.support.forced import forced, random_experts
from tests.support.machine import binding, engine_processes, inductor, needs
from tests.support.measure import rel_err
from vllm_weir.client.response_fields import array_of

pytestmark = pytest.mark.engine
THOROUGH = pytest.mark.thorough
EXPERTS = 8
NEAR = 2e-4
"""On log-probabilities, against transformers in float32."""


def replaying(array, generated=6, sampled=None, **more):
    params = sampling(generated, detokenize=False, logprobs=1, prompt_logprobs=0, **(sampled or {}))
    return weir.params(params, routing=weir.Replay(array, **more))


def logprobs(out, completion=0):
    """Log-probabilities of the tokens of the prompt from its second on, and of those that were generated."""
    ids = out.prompt_token_ids
    of_prompt = [at[ids[k]].logprob for k, at in enumerate(out.prompt_logprobs or ()) if at is not None]
    done = out.outputs[completion]
    return np.array([*of_prompt, *(at[token].logprob for at, token in zip(done.logprobs, done.token_ids, strict=True))])


def expected(oracle, ids, array, experts=EXPERTS, start=0):
    """transformers' log-probabilities of all but the first token."""
    with forced(oracle, array, experts, start):
        logits = oracle.logits(ids[:-1])
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


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
def test_experts_are_those_of_the_array(root, architecture):
    """A rollout's own, which change no log-probability, and any others, as transformers has them; free beyond them."""
    llm = engine(root, architecture)
    oracle = Oracle(root / architecture)
    plain = sampling(6, detokenize=False, logprobs=1, prompt_logprobs=0)
    (rollout,) = llm.generate(prompts((40,)), weir.params(plain, routing=True), use_tqdm=False)
    own = rollout.outputs[0].routed_experts
    ids = [*rollout.prompt_token_ids, *rollout.outputs[0].token_ids]
    scored = {"prompt_token_ids": ids}
    (again,) = llm.generate([scored], replaying(own, 1), use_tqdm=False)
    assert np.array_equal(again.outputs[0].routed_experts[: len(own)], own)
    assert np.abs(logprobs(again)[: len(ids) - 1] - logprobs(rollout)).max() < 1e-5

    dense = tuple(block for block in range(own.shape[1]) if not own[:, block].any())
    other = random_experts((30, *own.shape[1:]), EXPERTS, 3, dense)
    swapped = own[:, :, ::-1].copy()  # the same experts in another order: weights come by the rule, not the router
    whole = random_experts((60, *own.shape[1:]), EXPERTS, 4, dense)
    given = [replaying(other), replaying(other, start=12), replaying(whole, weights=True), replaying(swapped)]
    outs = llm.generate([scored] * 4, given, use_tqdm=False)
    for out, array, start in zip(outs, (other, other, whole, swapped), (0, 12, 0, 0), strict=True):
        found = out.outputs[0].routed_experts
        end = min(len(found), start + len(array))
        assert np.array_equal(found[start:end], array[: end - start])
        sequence_ids = [*ids, *out.outputs[0].token_ids]
        off = logprobs(out) - expected(oracle, sequence_ids, array, start=start)
        assert np.abs(off).max() < NEAR, np.abs(off)
    assert np.abs(logprobs(outs[0])[:20] - logprobs(rollout)[:20]).max() > 100 * NEAR
    assert outs[2].outputs[0].routing_weights.shape == outs[2].outputs[0].routed_experts.shape


def mixtral(root, **more):
    return get_llm(directory(root, "mixtral"), **{"block_size": 32} | more)


def test_neighbours_keep_their_bits(root):
    llm = mixtral(root, enable_prefix_caching=False)
    array = random_experts((50, 3, 2), EXPERTS, 5)
    plain = sampling(6, detokenize=False, logprobs=1, prompt_logprobs=0)
    asked = weir.params(plain, routing=True)
    alone = llm.generate(prompts((40, 7, 18)), [plain, asked, asked], use_tqdm=False)
    beside = llm.generate(prompts((40, 7, 18)), [plain, replaying(array), asked], use_tqdm=False)
    for k in (0, 2):
        assert alone[k].outputs[0].token_ids == beside[k].outputs[0].token_ids
        assert np.array_equal(logprobs(alone[k]), logprobs(beside[k]))
    assert np.array_equal(alone[2].outputs[0].routed_experts, beside[2].outputs[0].routed_experts)
    assert not np.array_equal(logprobs(alone[1]), logprobs(beside[1]))


def test_blocks_of_the_prefix_cache_are_shared_where_experts_are(root):
    llm = mixtral(root)
    (prompt,) = prompts((80,))
    array, other = random_experts((80, 3, 2), EXPERTS, 6), random_experts((80, 3, 2), EXPERTS, 7)
    half = np.concatenate([array[:32], other[32:]])
    plain = sampling(4, detokenize=False, logprobs=1)

    def hits(experts=None, **more):
        params = plain if experts is None else weir.params(plain, routing=weir.Replay(experts, **more))
        (out,) = llm.generate([prompt], params, use_tqdm=False)
        return out.num_cached_tokens, logprobs(out)

    first = {}
    for name, experts in (("array", array), ("other", other), ("half", half), ("none", None)):
        cached, first[name] = hits(experts, prompt_start=80)
        assert cached == (32 if name == "half" else 0), name
    for name, experts in (("array", array), ("other", other), ("half", half), ("none", None)):
        cached, again = hits(experts, prompt_start=80)
        assert cached == 64 and np.abs(again - first[name]).max() < 1e-4, name
    assert len({value.tobytes() for value in first.values()}) == 4
    assert hits(array[:20], prompt_start=80)[0] == 0 and hits(array)[0] == 0  # rows of all positions are wanted


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(SCARCE, id="thrown out"),
        pytest.param(dict(enforce_eager=False, in_process=False, block_size=32), id="compiled", marks=needs(inductor)),
        pytest.param(dict(block_size=32, pipeline_parallel_size=2), id="stages", marks=TWO),
        pytest.param(dict(block_size=32, tensor_parallel_size=2), id="ranks", marks=TWO),
    ],
)
def test_however_the_engine_runs(root, tmp_path, arguments):
    """Prompts in chunks, preempted requests, a compiled model, pipeline stages and tensor-parallel ranks."""
    env = {"VLLM_CACHE_ROOT": str(tmp_path)} if "enforce_eager" in arguments else None
    if "parallel" in str(arguments):
        env = {"VLLM_CPU_OMP_THREADS_BIND": binding(2)}
    llm = get_llm(directory(root, "mixtral"), **arguments, env=env)
    oracle = Oracle(directory(root, "mixtral"))
    generated = 100 if arguments is SCARCE else 6
    params = sampling(generated, detokenize=False, logprobs=1)
    arrays = [random_experts((34 + generated, 3, 2), EXPERTS, 8 + k) for k in range(6)]
    asked = [weir.params(params, routing=weir.Replay(array)) for array in arrays]
    for out, array in zip(llm.generate(prompts((30, 31, 60, 33, 32, 35)), asked, use_tqdm=False), arrays, strict=True):
        done, ids = out.outputs[0], sequence(out)
        n = min(len(array), len(ids))
        assert np.array_equal(done.routed_experts[:n], array[:n])
        all_ids = [*out.prompt_token_ids, *done.token_ids]
        off = logprobs(out) - expected(oracle, all_ids, array)[-generated:]
        assert np.abs(off).max() < 5 * NEAR


def test_drafts_are_verified_with_the_experts_of_their_positions(root):
    llm = mixtral(root, speculative_config=SPECULATIVE)
    array, (prompt,) = random_experts((60, 3, 2), EXPERTS, 20), prompts((30,))
    asked = weir.params(sampling(24, detokenize=False, logprobs=1), routing=weir.Replay(array))
    (out,) = llm.generate([prompt], asked, use_tqdm=False)
    KnownDrafter.teach([[*out.prompt_token_ids, *out.outputs[0].token_ids]])
    (drafted,) = llm.generate([prompt], asked, use_tqdm=False)
    oracle = Oracle(directory(root, "mixtral"))
    for one in (out, drafted):
        ids = [*one.prompt_token_ids, *one.outputs[0].token_ids]
        assert np.array_equal(one.outputs[0].routed_experts, array[: len(ids) - 1])
        assert np.abs(logprobs(one) - expected(oracle, ids, array)[-24:]).max() < NEAR


def test_beside_captures_steering_and_several_sequences(root):
    llm = mixtral(root)
    oracle, array = Oracle(directory(root, "mixtral")), random_experts((24, 3, 2), EXPERTS, 30)
    vector = torch.randn(oracle.hidden_size, generator=torch.Generator().manual_seed(1))
    params = weir.params(
        sampling(8, n=3, temperature=1.0, seed=5, detokenize=False),
        routing=weir.Replay(array),
        capture=[weir.Capture("resid_post", positions="all"), weir.Capture("expert_ids", dtype=None)],
        interventions=weir.Add(vector, layers=[1]),
    )
    (out,) = llm.generate(prompts((20,)), params, use_tqdm=False)
    assert len({tuple(completion.token_ids) for completion in out.outputs}) == 3
    for number, completion in enumerate(out.outputs):
        ids = sequence(out, number)
        with forced(oracle, array, EXPERTS):
            rows, _ = oracle.steer(ids, "resid_post", 1, vector)
        assert np.array_equal(completion.routed_experts[:24], array)
        for layer in range(3):
            assert rel_err(completion.activations["resid_post", layer], rows["resid_post", layer]) < BOUND
            chosen = completion.activations["expert_ids", layer]  # what the logits alone would choose
            assert not np.array_equal(np.sort(chosen.numpy()[:24]), np.sort(array[:, layer]))
    del out, completion, chosen
    assert_nothing_is_held(llm)


@pytest.mark.parametrize(
    ("array", "more", "field", "says"),
    [
        (random_experts((5, 2, 2), 8, 1), {}, "routing.array", "3 blocks, 2 experts"),
        (random_experts((5, 3, 3), 8, 1), {}, "routing.array", "3 blocks, 2 experts"),
        (random_experts((5, 3, 2), 8, 1) + 8, {}, "routing.array", "none of the experts 0..7"),
        (np.ones((5, 3, 2), np.int64), {}, "routing.array", "occurs twice"),
        (random_experts((5, 3, 2), 8, 1), {"start": 99}, "routing.start", "at most"),
        (random_experts((5, 3, 2), 8, 1), {"prompt_start": 99}, "routing.prompt_start", "prompt has"),
    ],
)
def test_what_the_model_cannot_choose_is_refused(root, array, more, field, says):
    llm = mixtral(root)
    with pytest.raises(weir.WeirError, match=says) as e:
        llm.generate(prompts((4,)), replaying(array, 2, **more), use_tqdm=False)
    assert e.value.field == field


def test_routers_without_a_known_rule_are_refused(root):
    """Phi-MoE chooses with a function of its own."""
    own = {"load_format": LOAD_FORMAT, "trust_remote_code": True}  # transformers does not run it
    llm = engine(root, "PhiMoEForCausalLM", enable_prefix_caching=False, **own)
    with pytest.raises(weir.WeirError, match="a function of its own") as e:
        llm.generate(prompts((4,)), replaying(random_experts((4, 4, 2), 8, 1)), use_tqdm=False)
    assert e.value.field == "routing"


@needs(engine_processes)
def test_over_http(root, tmp_path):
    llm, text = mixtral(root), "Tom went to the"
    common = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    array = random_experts((8, 3, 2), EXPERTS, 40)
    (out,) = llm.generate([text], weir.params(sampling(6), routing=weir.Replay(array)), use_tqdm=False)
    wanted = out.outputs[0].routed_experts
    n = min(len(array), len(wanted))
    assert np.array_equal(wanted[:n], array[:n])
    close_all()
    file = io.BytesIO()
    np.save(file, array.astype(np.int64))
    wish = {"v": 1, "routing": {"array": base64.b64encode(file.getvalue()).decode()}}
    model = str(directory(root, "mixtral"))
    with running(tmp_path / "log", WEIR, "--enable-scale-out", model=model, forked=True) as http:
        (choice,) = post(http, COMPLETIONS, prompt=text, weir=wish, **common)["choices"]
        assert np.array_equal(array_of(choice["routed_experts"]), wanted) and choice["text"] == out.outputs[0].text
        asked = {"token_ids": out.prompt_token_ids, "sampling_params": common | {"extra_args": {"weir": wish}}}
        answer = http.post("/inference/v1/generate", json=asked)
        assert answer.status_code == 200, answer.text
        assert np.array_equal(array_of(answer.json()["choices"][0]["routed_experts"]), wanted)
        done = weir.Client(str(http.base_url), api_key=API_KEY).generate(text, routing=weir.Replay(array), **common)
        assert np.array_equal(done.routed_experts, wanted)
        for given in ("AAAA", "no base64", [[1]], 3):
            body = {"prompt": text, "weir": {"v": 1, "routing": {"array": given}}, **common}
            answer = http.post(COMPLETIONS, json=body)
            assert answer.status_code == 400 and "routing.array" in answer.text, answer.text
