"""Engines that pool: rows of the prompt, and steering that what is pooled shows, offline and in an `AsyncLLM`."""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import PoolingParams

import vllm_weir as weir
from tests.engine.common import assert_nothing_is_held, directory, frontend, oracle, tokens
from tests.engine.serving import WEIR, running
from tests.support.check import expected_positions
from tests.support.engines import async_llm, get_llm
from tests.support.machine import engine_processes, needs
from tests.support.measure import eventually, rel_err
from tests.support.models import VOCAB, make_tokenizer

pytestmark = pytest.mark.engine
THOROUGH = pytest.mark.thorough
BOUND = 1e-5
BLOCK, LAYERS, WIDTH = 1, 4, 128
LENGTHS = (100, 33, 1, 64, 100)
OPTIONS = dict(runner="pooling", block_size=32, max_num_batched_tokens=64, max_num_seqs=4, enable_chunked_prefill=True)
HOOKS = ("embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post", "q_rot", "mlp_post", "final_norm")


def embedder(root, **more):
    return get_llm(directory(root), convert="embed", enable_prefix_caching=True, **OPTIONS | more)


def classifier(root, labels):
    """The model with a head of `labels` classes: its directory, and the head's weight."""
    target = root / f"llama-{labels}-classes"
    if not target.exists():
        shutil.copytree(directory(root), target)
        weights = load_file(target / "model.safetensors")
        del weights["lm_head.weight"]
        weights["score.weight"] = torch.randn(labels, WIDTH, generator=torch.Generator().manual_seed(labels))
        save_file(weights, target / "model.safetensors", {"format": "pt"})
        config = json.loads((target / "config.json").read_text())
        config["architectures"] = ["LlamaForSequenceClassification"]
        config["id2label"] = {str(n): f"label {n}" for n in range(labels)}
        config["label2id"] = {f"label {n}": n for n in range(labels)}
        (target / "config.json").write_text(json.dumps(config))
    return target, load_file(target / "model.safetensors")["score.weight"]


def vector(seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))


def given(lengths=LENGTHS):
    return [{"prompt_token_ids": tokens(n, i)} for i, n in enumerate(lengths)]


def everything(selector="all"):
    return [weir.Capture(hook, positions=selector) for hook in HOOKS]


def normed(row):
    return row / row.norm()


def check(out, truth, seed, selector="all", add=None):
    """An output has the rows of its prompt, `add` (vector, positions) added."""
    ids = out.prompt_token_ids
    assert ids == tokens(len(ids), seed)
    rows, _ = truth.points.points(ids) if add is None else truth.points.steer(ids, "resid_post", BLOCK, *add)
    at = expected_positions(selector, len(ids), 1, ids)
    assert {site.hook for site in out.activations.sites} == set(HOOKS)
    for site in out.activations.sites:
        assert out.activations.positions_of(*site).tolist() == at
        assert out.activations.token_ids_of(*site).tolist() == [ids[p] for p in at]
        assert rel_err(out.activations[site], rows[tuple(site)][at]) <= BOUND, site
    assert (out.receipt.prompt_tokens, out.receipt.generated_tokens) == (len(ids), 0)
    assert out.receipt.complete
    return rows


@pytest.mark.parametrize(
    "selector",
    ["all", *(pytest.param(s, marks=THOROUGH) for s in ("last_prompt", "sampled", [0, -1], {"not_token_ids": [9]}))],
)
def test_rows(root, selector):
    """In chunks, beside plain requests, and again with what is in the prefix cache; embeddings do not change."""
    llm, truth = embedder(root), oracle(directory(root))
    plain = [out.outputs.embedding for out in llm.embed(given(), use_tqdm=False)]
    asked = [weir.params(PoolingParams(), capture=everything(selector)), PoolingParams()] * 2
    for _ in range(2):
        outs = llm.embed(given(), pooling_params=[*asked, asked[0]], use_tqdm=False)
        for n, out in enumerate(outs):
            assert rel_err(torch.tensor(out.outputs.embedding), torch.tensor(plain[n])) <= BOUND
            if n % 2:
                assert out.activations is None and out.receipt is None
                continue
            rows = check(out, truth, n, selector)
            assert rel_err(torch.tensor(out.outputs.embedding), normed(rows["final_norm", 0][-1])) <= BOUND
    copied = pickle.loads(pickle.dumps(outs[0]))  # noqa: S301
    assert torch.equal(copied.activations["resid_post", 0], outs[0].activations["resid_post", 0])
    assert torch.equal(outs[0].outputs.activations["resid_post", 0], outs[0].activations["resid_post", 0])
    del outs, out
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("selector", [[5, -3], *(pytest.param(s, marks=THOROUGH) for s in ("all", "last_prompt"))])
def test_steering(root, selector):
    """The embedding is the steered model's, neighbours keep theirs, and so do later plain requests."""
    llm, truth = embedder(root), oracle(directory(root))
    texts = [given((40,))[0]] * 3
    (plain,) = llm.embed(texts[:1], use_tqdm=False)
    add = weir.Add(vector(), BLOCK, positions=selector)
    steered = weir.params(PoolingParams(), interventions=add, capture=everything())
    for _ in range(2):
        first, out, last = llm.embed(texts, pooling_params=[PoolingParams(), steered, PoolingParams()], use_tqdm=False)
        at = expected_positions(selector, 40, 1)
        rows = check(out, truth, 0, add=(vector(), at))
        assert rel_err(torch.tensor(out.outputs.embedding), normed(rows["final_norm", 0][-1])) <= BOUND
        assert rel_err(torch.tensor(out.outputs.embedding), torch.tensor(plain.outputs.embedding)) > 0.01
        (done,) = out.receipt.steered
        assert done[weir.Site("resid_post", BLOCK)] + out.receipt.shared[0] == len(at)
        for beside in (first, last):
            assert rel_err(torch.tensor(beside.outputs.embedding), torch.tensor(plain.outputs.embedding)) <= BOUND
    weir.set_global(llm, [add])
    try:
        (out,) = llm.encode(texts[:1], pooling_task="embed", use_tqdm=False)
    finally:
        weir.clear_global(llm)
    assert rel_err(out.outputs.data, normed(rows["final_norm", 0][-1])) <= BOUND and out.activations is None
    del first, out, last, beside
    assert_nothing_is_held(llm)


def test_probes_and_features(root):
    """Scores of the prompt, and a named vector."""
    llm, truth = embedder(root), oracle(directory(root))
    weir.register(llm, "v", vector())
    try:
        asked = weir.params(
            PoolingParams(),
            probes=weir.Probe("p", vector(2), layer=3),
            interventions=weir.Add("v", BLOCK, when=weir.When("q", above=0.0)),
            capture=weir.Capture("resid_post", 3),
        )
        with pytest.raises(weir.WeirError, match="no probe is registered"):
            llm.embed(given((9,)), pooling_params=asked, use_tqdm=False)
        weir.register_probe(llm, weir.Probe("q", vector(3), layer=0))
        (out,) = llm.embed(given((9,)), pooling_params=asked, use_tqdm=False)
    finally:
        weir.unregister(llm, "v")
        weir.unregister_probe(llm, "q")
    scores = truth.points.points(tokens(9))[0]["resid_post", 0] @ vector(3)
    acted = [p for p in range(9) if scores[p] > 0]
    rows, _ = truth.points.steer(tokens(9), "resid_post", BLOCK, vector(), acted)
    assert 0 < len(acted) < 9 and out.receipt.gates[0]["fired"] == len(acted)
    assert rel_err(out.activations["resid_post", 3], rows["resid_post", 3]) <= BOUND
    assert rel_err(out.scores["p"][:, 0], rows["resid_post", 3] @ vector(2)) <= BOUND
    del out
    assert_nothing_is_held(llm)


def test_refusals(root):
    """Each names its field, and the engine goes on."""
    llm = embedder(root)
    assert frontend(llm).engine.refusal is None, "no engine that pools is refused as a whole"
    probe = weir.Probe("p", vector(2), layer=0)
    for asked, field in (
        ({"capture": weir.Capture("resid_post", positions="generated")}, "capture[0].positions"),
        ({"probes": probe, "stop_when": "p > 0.5"}, "stop_when"),
        ({"lens": weir.Lens(layers=[1])}, "lens"),
    ):
        with pytest.raises(weir.WeirError) as e:
            llm.embed(given((9,)), pooling_params=weir.params(PoolingParams(), **asked), use_tqdm=False)
        assert e.value.field == field, e.value
    asked = weir.params(PoolingParams(), capture=weir.Capture("resid_post"))
    with pytest.raises(weir.WeirError, match=r"use LLM\.embed"):
        llm.score("w5 w6", ["w7 w8"], pooling_params=asked, use_tqdm=False)
    assert len(llm.score("w5 w6", ["w7 w8"], use_tqdm=False)) == 1
    misspelt = PoolingParams(extra_kwargs={"wier": {}})
    with pytest.raises(weir.WeirError, match="did you mean 'weir'"):
        llm.embed(given((9,)), pooling_params=misspelt, use_tqdm=False)
    assert asked.extra_kwargs["weir"]["capture"] and PoolingParams().extra_kwargs is None
    del e
    assert_nothing_is_held(llm)


def test_classes(root):
    """`LLM.classify` of a decoder with a head: probabilities follow from the steered rows."""
    target, head = classifier(root, 3)
    llm, truth = get_llm(target, enable_prefix_caching=True, **OPTIONS), oracle(directory(root))
    assert all(v.supported for v in weir.sites(llm) if v.hook in HOOKS)
    add = weir.Add(vector(), BLOCK)
    asked = weir.params(PoolingParams(), capture=everything(), interventions=add)
    plain, out = llm.classify(given((40, 40))[:1] * 2, pooling_params=[PoolingParams(), asked], use_tqdm=False)
    rows = check(out, truth, 0, add=(vector(), list(range(40))))
    assert rel_err(torch.tensor(out.outputs.probs), (head @ rows["final_norm", 0][-1]).softmax(-1)) <= BOUND
    reference = truth.points.points(tokens(40))[0]["final_norm", 0][-1]
    assert rel_err(torch.tensor(plain.outputs.probs), (head @ reference).softmax(-1)) <= BOUND
    del plain, out
    assert_nothing_is_held(llm)


@pytest.mark.thorough
def test_scores_of_pairs(root):
    """`LLM.score` of a cross-encoder: a pair is one prompt, whose rows the score has."""
    target, head = classifier(root, 1)
    llm, truth = get_llm(target, enable_prefix_caching=True, **OPTIONS), oracle(directory(root))
    asked = weir.params(PoolingParams(), capture=weir.Capture("final_norm"))
    for out in llm.score("w5 w6", ["w7 w8", "w9"], pooling_params=asked, use_tqdm=False):
        rows, _ = truth.points.points(out.prompt_token_ids)
        assert rel_err(out.activations["final_norm", 0], rows["final_norm", 0]) <= BOUND
        score = (head @ out.activations["final_norm", 0][-1]).sigmoid()
        assert rel_err(torch.tensor([out.outputs.score]), score) <= BOUND
    del out
    assert_nothing_is_held(llm)


@pytest.mark.thorough
@needs(engine_processes)
def test_async(root):
    """`AsyncLLM.encode`, with requests that are given up."""
    truth = oracle(directory(root))

    async def run() -> None:
        engine = async_llm(directory(root), convert="embed", **OPTIONS)
        try:
            asked = weir.params(PoolingParams(task="embed"), capture=everything())

            async def one(n: int):
                async for out in engine.encode({"prompt_token_ids": tokens(LENGTHS[n], n)}, asked, f"r{n}"):
                    last = out
                return last

            for n, out in enumerate(await asyncio.gather(*map(one, range(len(LENGTHS))))):
                check(out, truth, n)
            given_up = [asyncio.create_task(one(n % 5)) for n in range(20)]
            await asyncio.sleep(0.02)
            for task in given_up:
                task.cancel()
            await asyncio.gather(*given_up, return_exceptions=True)
            del given_up, out, task  # which refer to outputs
            assert len((await one(0)).activations.sites) > LAYERS
            store = engine.output_processor._weir_frontend.store
            await asyncio.to_thread(eventually, lambda: len(store), 0, 5)
        finally:
            engine.shutdown()

    asyncio.run(run())


@pytest.mark.thorough
@needs(engine_processes)
def test_served(root, tmp_path):
    """Responses of these routes cannot carry rows: each refuses Weir's keys, and serves plain bodies."""
    args = ["--dtype", "float32", "--max-model-len", "128", "--enforce-eager", "--kv-cache-memory-bytes", "33554432"]
    args += ["--served-model-name", "demo", "--host", "127.0.0.1", "--runner", "pooling", "--convert", "embed"]
    bodies = {
        "/v1/embeddings": {"input": "w5 w6"},
        "/pooling": {"input": "w5 w6", "task": "embed"},
        "/score": {"data_1": "w5", "data_2": ["w6"]},
        "/v2/embed": {"texts": ["w5"], "embedding_types": ["float"]},
    }
    with running(tmp_path / "log", WEIR, forked=True, model=str(directory(root)), args=args) as http:
        for route, body in bodies.items():
            body = {"model": "demo"} | body
            assert http.post(route, json=body).status_code == 200, route
            weir_object = {"v": 1, "capture": [{"hook": "resid_post"}]}
            for more, named in (
                ({"weir": weir_object}, "weir"),
                ({"vllm_xargs": {"weir": json.dumps(weir_object)}}, "weir"),
                ({"wier": weir_object}, "wier"),
            ):
                refused = http.post(route, json=body | more)
                assert refused.status_code == 400, (route, more, refused.text)
                assert refused.json()["error"]["param"] == named, (route, refused.text)


def encoder(root):
    """A tiny BERT: norms come after what they add up, and every token sees all others."""
    from transformers import AutoConfig, AutoModel

    target = root / "bert"
    if not target.exists():
        sizes = dict(hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=4, intermediate_size=192)
        model = AutoModel.from_config(AutoConfig.for_model("bert", vocab_size=VOCAB, **sizes), dtype=torch.float32)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.2 * noise if parameter.dim() > 1 else 0.1 * noise + name.endswith("Norm.weight"))
        model.save_pretrained(target)
        make_tokenizer(target)
    return target


def test_encoder(root):
    """What enters and leaves each block; points that such a block has not are refused one by one."""
    from transformers import AutoModel

    llm = get_llm(encoder(root), runner="pooling")
    truth = AutoModel.from_pretrained(encoder(root), dtype=torch.float32, attn_implementation="eager").eval()
    served = {v.hook for v in weir.sites(llm) if v.supported}
    assert served == {"embed", "resid_pre", "attn_in", "q", "k", "v", "q_rot", "k_rot", "resid_post"}

    def reference(ids, added=None):
        last = truth.encoder.layer[BLOCK].output  # whose result leaves the block
        handle = None if added is None else last.register_forward_hook(lambda _module, _args, out: out + added)
        try:
            with torch.no_grad():
                return truth(torch.tensor([ids]), output_hidden_states=True).hidden_states
        finally:
            if handle is not None:
                handle.remove()

    capture = [weir.Capture("resid_pre"), weir.Capture("resid_post")]
    plain = weir.params(PoolingParams(), capture=capture)
    add = weir.params(plain, interventions=weir.Add(vector(), BLOCK, positions=[2, -1]))
    at = torch.zeros(33, WIDTH)
    at[[2, 32]] = vector()
    outs = llm.embed(given((100, 33, 1)), pooling_params=[plain, add, plain], use_tqdm=False)
    for out, added in zip(outs, (None, at, None), strict=True):
        streams = reference(out.prompt_token_ids, added)
        for site in out.activations.sites:
            row = streams[site.layer + (site.hook == "resid_post")][0]
            assert rel_err(out.activations[site], row) <= BOUND, site
    with pytest.raises(weir.WeirError, match="what the MLP adds"):
        asked = weir.params(PoolingParams(), capture=weir.Capture("mlp_out"))
        llm.embed(given((9,)), pooling_params=asked, use_tqdm=False)
    del outs, out
    assert_nothing_is_held(llm)


def test_fit(root):
    """Directions are those of transformers' rows; the check steers what is pooled, and reads the rows or the output."""
    llm, truth = embedder(root), oracle(directory(root))
    sides = [[tokens(20 + seed % 3, seed) for seed in range(start, start + 6)] for start in (0, 50)]
    found = weir.fit(llm, *sides, layers=[1, 3], progress=False)
    for layer in (1, 3):
        rows = [torch.stack([truth.rows(ids)["resid_post", layer][-1] for ids in side]) for side in sides]
        length = found.details["layers"][str(layer)]["norm"]
        assert (found.vector(layer) - (rows[0].mean(0) - rows[1].mean(0))).abs().max() < 1e-5 * length
    check = found.details["causal"]
    assert check["layer"] == 1 and check["readout"] == "probe's score at resid_post.3"
    assert check["means"]["added_negative"] > check["means"]["plain_negative"]
    heads = weir.fit(llm, *sides, hook="z", heads=[3], layers=2, positions="prompt", check=False, progress=False)
    rows = [torch.stack([truth.rows(ids)["z", 2].mean(0)[3] for ids in side]) for side in sides]
    assert rel_err(heads[3].vector(2), rows[0].mean(0) - rows[1].mean(0)) < 1e-4
    first = weir.fit(llm, *sides, layers=3, metric=lambda out: float(out.outputs.data[0]), progress=False)
    held = first.details["causal"]["prompts"]["positive"]
    embeddings = [normed(truth.rows(ids)["final_norm", 0][-1])[0] for ids in sides[0]]
    assert (
        held and min(embeddings) - 1e-4 <= first.details["causal"]["means"]["plain_positive"] <= max(embeddings) + 1e-4
    )
    with pytest.raises(weir.WeirError, match="an engine that pools has no logits") as e:
        weir.fit(llm, *sides, layers=3, metric=weir.logit_diff(3, 5), progress=False)
    assert e.value.field == "metric"
    with pytest.raises(weir.WeirError, match="samples nothing"):
        weir.fit(llm, *sides, layers=3, metric=len, sampling=weir.SamplingParams(), progress=False)
    assert_nothing_is_held(llm)
