"""AsyncLLM in processes of its own: streams, slow readers, aborts, refusals."""

from __future__ import annotations

import asyncio
import importlib
from types import SimpleNamespace

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import SELECTORS, asking, directory, ids_of, oracle, prompts, sampling, tokens, verify
from tests.engine.probe_cases import random_probe, reference
from tests.support.check import expected_positions
from tests.support.engines import async_llm
from tests.support.hook_functions import breaks_at_31
from tests.support.machine import engine_processes, needs
from tests.support.measure import nothing_held, rel_err
from tests.support.sae_reference import weights
from tests.support.spans import recorded

pytestmark = [pytest.mark.engine, needs(engine_processes)]
LAYERS = 4
THOROUGH = pytest.mark.thorough
KINDS = pytest.mark.parametrize(
    "name", ["DELTA", *(pytest.param(k, marks=THOROUGH) for k in ("CUMULATIVE", "FINAL_ONLY"))]
)


class Served:
    """An AsyncLLM and the one event loop that it lives in."""

    def __init__(self, model_dir):
        self.loop = asyncio.new_event_loop()
        self.engine = self.call(self._start(model_dir))

    async def _start(self, model_dir):
        return async_llm(model_dir)

    def call(self, awaitable):
        return self.loop.run_until_complete(asyncio.wait_for(awaitable, 600))

    def close(self):
        self.engine.shutdown()
        rest = asyncio.all_tasks(self.loop)
        for task in rest:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
        self.loop.close()


@pytest.fixture(scope="module")
def served(root):
    made = Served(directory(root))
    yield made
    made.close()


@pytest.fixture
def truth(root):
    return oracle(directory(root))


def kind(name):
    from vllm.sampling_params import RequestOutputKind

    return {"output_kind": RequestOutputKind[name]}


async def stream(engine, prompt, params, name, pause=0.0):
    found = []
    async for out in engine.generate(prompt, params, name):
        found.append(out)
        if pause:
            await asyncio.sleep(pause)
    return found


def test_cumulative_outputs_grow_to_the_final_rows(served, truth):
    async def many():
        asked = [asking(s, LAYERS, max_tokens=20, **kind("CUMULATIVE")) for s in [*SELECTORS, "all"]]
        texts, pauses = prompts(), [*[0.0] * len(SELECTORS), 0.05]  # the last reader is slow
        jobs = [
            stream(served.engine, texts[i % len(texts)], a, f"c{i}", pause)
            for i, ((a, _), pause) in enumerate(zip(asked, pauses, strict=True))
        ]
        return await asyncio.gather(*jobs), [w for _, w in asked]

    found, wanted = served.call(many())
    assert any(len(outs) > 5 for outs in found) and len(found[-1]) < 20
    for outs, sites in zip(found, wanted, strict=True):
        verify(outs[-1], sites, truth)
        final, P = outs[-1].activations, len(outs[-1].prompt_token_ids)
        for out in outs[:-1]:
            assert not out.receipt.complete
            ids = ids_of(out)
            assert ids == ids_of(outs[-1])[: len(ids)] and out.receipt.generated_tokens == len(ids) - P
            for site, (selector,) in sites.items():
                at = expected_positions(selector, P, len(out.outputs[0].token_ids), ids)
                assert out.activations.positions_of(*site).tolist() == at
                assert out.activations[site].equal(final[site][: len(at)])


@pytest.mark.parametrize(
    ("n", "pause"),
    [(3, 0.05), *(pytest.param(n, pause, marks=THOROUGH) for n, pause in ((1, 0.0), (1, 0.05), (3, 0.0)))],
)
def test_deltas_add_up_to_all_rows(served, truth, pause, n):
    """A slow reader finds outputs merged; no row is lost, and none comes twice."""

    async def many():
        params = [asking(s, LAYERS, max_tokens=30, n=n, temperature=0.8, seed=5, **kind("DELTA"))[0] for s in SELECTORS]
        jobs = [
            stream(served.engine, p, a, f"d{n}{pause}{i}", pause) for i, (p, a) in enumerate(zip(prompts(), params))
        ]
        return await asyncio.gather(*jobs)

    found = served.call(many())
    merged = False
    for outs, selector in zip(found, SELECTORS, strict=True):
        P = len(outs[0].prompt_token_ids)
        for index in range(n):
            parts = [c for out in outs for c in out.outputs if c.index == index]
            ids = list(outs[0].prompt_token_ids) + [t for c in parts for t in c.token_ids]
            assert len(ids) == P + 30
            merged |= any(len(c.token_ids) > 1 for c in parts)
            reference = truth.rows(ids[:-1])
            at = expected_positions(selector, P, 30, ids)
            for site in parts[0].activations.sites:
                assert [p for c in parts for p in c.activations.positions_of(*site).tolist()] == at
                rows = torch.cat([c.activations[site] for c in parts])
                if at:
                    assert rel_err(rows, reference[tuple(site)][at]) <= 1e-5
    if pause:
        assert merged, "no outputs were merged: this shows nothing about slow readers"


def test_abort_midway(served, truth):
    params, wanted = asking("all", LAYERS, max_tokens=150, **kind("CUMULATIVE"))

    async def leave():
        """One reader walks away, one asks for the abort, one stays."""
        stays = asyncio.create_task(stream(served.engine, prompts([20])[0], params, "stays"))

        async def walk_away():
            async for out in served.engine.generate(prompts([9])[0], params, "walks"):
                if len(out.outputs[0].token_ids) > 3:
                    return

        async def abort():
            last = None
            async for out in served.engine.generate({"prompt_token_ids": tokens(9)}, params, "aborted"):
                last = out
                if len(out.outputs[0].token_ids) > 3:
                    await served.engine.abort("aborted")
            return last

        _, last = await asyncio.gather(walk_away(), abort())
        return last, await stays

    last, stays = served.call(leave())
    assert len(last.outputs[0].token_ids) < 150 and not last.receipt.complete
    reference = truth.rows(ids_of(last)[:-1])
    for site in last.activations.sites:
        at = last.activations.positions_of(*site)
        assert len(at) and rel_err(last.activations[site], reference[tuple(site)][at]) <= 1e-5
    verify(stays[-1], wanted, truth)


@pytest.mark.parametrize(
    ("extra_args", "field"),
    [
        ({"weir": {"v": 1, "capture": [{"layers": [99]}]}}, "capture[0].layers"),
        ({"weir": "{"}, "weir"),
        ({"weir": {"v": 1, "capture": [{"hook": "attn_oat"}]}}, "capture[0].hook"),
        ({"apply_steering_vectors": [1]}, "apply_steering_vectors[0].activations"),
    ],
)
def test_a_bad_wish_is_a_weir_error_and_the_client_s_mistake(served, truth, extra_args, field):
    from vllm.v1.engine.exceptions import EngineGenerateError

    for n in (1, 2):
        params = sampling(4, n=n, temperature=1.0, extra_args=extra_args, **kind("CUMULATIVE"))
        with pytest.raises(weir.WeirError) as e:
            served.call(stream(served.engine, prompts([5])[0], params, f"bad{n}{field}"))
        assert e.value.field == field and not isinstance(e.value, EngineGenerateError)
        if hasattr(vllm_exceptions := importlib.import_module("vllm.exceptions"), "VLLMClientError"):  # not up to 0.28
            assert isinstance(e.value, vllm_exceptions.VLLMClientError)
    good, wanted = asking("all", LAYERS, max_tokens=3, **kind("CUMULATIVE"))
    verify(served.call(stream(served.engine, prompts([5])[0], good, f"good{field}"))[-1], wanted, truth)


@pytest.mark.parametrize("name", ["DELTA", "CUMULATIVE"])
def test_a_hook_that_raises_ends_its_own_stream(served, truth, name):
    bad = weir.params(sampling(20, **kind(name)), hooks=weir.Hook(breaks_at_31, layers=1))
    good, wanted = asking("all", LAYERS, max_tokens=20, **kind("CUMULATIVE"))

    async def both():
        jobs = [stream(served.engine, prompts([25])[0], p, f"{name}{k}") for k, p in enumerate((bad, good))]
        return await asyncio.gather(*jobs, return_exceptions=True)

    failed, outs = served.call(both())
    assert isinstance(failed, weir.WeirError) and "ValueError: enough (line" in str(failed)
    verify(outs[-1], wanted, truth)


def autoencoder(architecture, site, seed, **options):
    return weir.SAE.from_tensors(architecture, site, **weights(architecture, seed, 128, 64), **options)


SAES = {
    "mid": autoencoder("gated", ("resid_post", 1), 31),
    "late": autoencoder("topk", ("resid_post", 3), 32, k=6),
}
FEATURES = [weir.Features("mid", top_k=4), weir.Features("late", ids=[5, 1], positions="generated")]


@KINDS
def test_features_of_two_autoencoders(served, truth, name):
    """Loaded while requests run; each output has the features of its tokens, by the rows of transformers."""

    async def many():
        asked = weir.params(sampling(12, **kind(name)), features=FEATURES)
        early = asyncio.create_task(stream(served.engine, prompts([9])[0], sampling(60), f"early{name}"))
        for one, sae in SAES.items():
            await weir.load_sae_async(served.engine, one, sae)
        assert [one.name for one in weir.saes(served.engine)] == ["late", "mid"]
        jobs = [stream(served.engine, p, asked, f"f{name}{i}") for i, p in enumerate(prompts([20, 5, 33]))]
        found = await asyncio.gather(*jobs)
        await early
        for one in SAES:
            await weir.unload_sae_async(served.engine, one)
        return found

    for outs in served.call(many()):
        P, last = len(outs[0].prompt_token_ids), outs[-1]
        parts = outs if name == "DELTA" else [last]
        ids = list(last.prompt_token_ids) + [t for out in parts for t in out.outputs[0].token_ids]
        assert len(ids) == P + 12
        reference = truth.rows(ids[:-1])
        for asked in FEATURES:
            sae, found = SAES[asked.name], [out.features[asked.name] for out in parts]
            at = list(range(P if asked.positions.kind == "generated" else 0, P + 11))
            assert [position for one in found for position in one.positions.tolist()] == at
            chosen, values = (torch.cat([getattr(one, what) for one in found]) for what in ("ids", "values"))
            dense = sae.encode(reference[tuple(sae.site)][at].float())
            assert torch.allclose(values, dense.gather(1, chosen), rtol=1e-4, atol=1e-4)
            if asked.top_k:
                assert torch.allclose(values, dense.topk(asked.top_k).values, rtol=1e-4, atol=1e-4)
        if name == "CUMULATIVE":
            for out in outs[:-1]:
                shown = out.features["mid"]
                assert torch.equal(shown.ids, last.features["mid"].ids[: len(shown)])


def test_a_feature_is_set_and_an_unloaded_autoencoder_is_unknown(served):
    sae = SAES["mid"]

    async def one(asked, name, **more):
        params = weir.params(sampling(4, **kind("FINAL_ONLY")), interventions=asked, **more)
        return (await stream(served.engine, prompts([14])[0], params, name))[-1]

    async def all_of_it():
        await weir.load_sae_async(served.engine, "mid", sae)
        with pytest.raises(weir.WeirError, match="unload it") as e:
            await weir.load_sae_async(served.engine, "mid", sae)
        assert e.value.field == "name"
        asked = weir.SetFeature("mid", 3, value=4.0)
        rows = [weir.Capture("resid_post", 1, before=before) for before in (True, False)]
        outs = [await one(asked, f"s{i}", capture=capture) for i, capture in enumerate(rows)]
        # Copies: what is raised below keeps this frame, and the rows that it would hold, until it is collected.
        before, after = (outs.pop(0).activations["resid_post", 1].clone() for _ in rows)
        await weir.unload_sae_async(served.engine, "mid")
        for more, field in (({"features": FEATURES[0]}, "features[0].name"), ({}, "interventions[0].name")):
            with pytest.raises(weir.WeirError, match="no autoencoder is loaded as 'mid'; none is") as e:
                await one(asked if not more else (), f"u{field}", **more)
            assert e.value.field == field
        with pytest.raises(weir.WeirError, match="no autoencoder"):
            await weir.unload_sae_async(served.engine, "mid")
        return before, after

    h, got = served.call(all_of_it())
    features = sae.encode(h)
    error = h - sae.decode(features)
    features[:, 3] = 4.0
    assert rel_err(got, sae.decode(features) + error) <= 1e-5
    assert weir.saes(served.engine) == []


def test_nothing_is_left_in_the_engine(served):
    async def usage():
        await stream(served.engine, prompts([3])[0], sampling(2), "last")
        await nothing_held(served.engine, 2.0)

    served.call(usage())
    assert not served.engine.output_processor.request_states


@KINDS
def test_a_stop_of_a_probe_in_streams(served, root, name):
    """Readers with rules of their own: nobody gets a token past the one whose score ended it."""
    probed = reference(directory(root))
    probe = random_probe("p", "linear", ("resid_post", 1), 3)

    async def many():
        whole = weir.params(sampling(16), probes=probe.public())
        texts = [{"prompt_token_ids": tokens(12 + i, i)} for i in range(12)]
        free = await asyncio.gather(*(stream(served.engine, t, whole, f"free{name}{i}") for i, t in enumerate(texts)))
        rules = []
        for i, outs in enumerate(free):
            scores = outs[-1].scores["p"][len(texts[i]["prompt_token_ids"]) :, 0]
            k = int(scores.argmax())
            if k and scores[k] - scores[:k].max() < 1e-3:  # rounding would decide
                k = 0
            below = scores[:k].max() if k else scores[k] - 1
            rules.append((k, float(scores[k] + below) / 2))
        jobs = []
        for i, (_, threshold) in enumerate(rules):
            asked = weir.params(sampling(16, **kind(name)), probes=probe.public(), stop_when=f"p > {threshold!r}")
            jobs.append(stream(served.engine, texts[i], asked, f"stop{name}{i}"))
            jobs.append(stream(served.engine, texts[i], sampling(16), f"plain{name}{i}"))
        return free, rules, await asyncio.gather(*jobs)

    free, rules, found = served.call(many())
    for whole, (k, _), outs, plain in zip(free, rules, found[::2], found[1::2], strict=True):
        made = list(whole[-1].outputs[0].token_ids)
        assert list(plain[-1].outputs[0].token_ids) == made
        last = outs[-1].outputs[0]
        assert outs[-1].finished and (last.finish_reason, last.stop_reason) == ("stop", "probe:p")
        parts = [list(out.outputs[0].token_ids) for out in outs]
        assert ([t for part in parts for t in part] if name == "DELTA" else parts[-1]) == made[: k + 1]
        ids = list(outs[-1].prompt_token_ids) + made[: k + 1]
        at, scores = probe.scores(probed.rows(ids)[probe.site], len(ids) - k - 1, ids)
        told = [out.scores for out in outs] if name == "DELTA" else [outs[-1].scores]
        assert [p for one in told for p in one.positions["p"].tolist()] == at
        assert rel_err(torch.cat([one["p"] for one in told]), scores) <= 1e-5
    del free, found
    served.call(nothing_held(served.engine, 2))


def test_what_is_built_on_an_engine_learns_what_this_one_serves(served):
    served.call(weir.sites_async(served.engine))
    engine = weir.engine(served.engine)
    assert engine.capabilities.num_layers == LAYERS and engine.interventions == ()
    for call in (lambda: engine.stream([]), lambda: engine.call_workers("weir_usage")):
        with pytest.raises(weir.WeirError, match=r"AsyncLLM answers only asynchronously; give a vllm\.LLM") as e:
            call()
        assert e.value.field == "llm"


def test_it_is_warmed_without_a_trace(served, truth):
    """What runs then is not counted by vLLM; later requests are as ever; a busy engine says so."""
    engine = served.engine
    asked, wanted = asking("all", LAYERS)
    params = [asked, weir.params(sampling(4), interventions=[weir.Add(torch.ones(128), 2, hook="mlp_out")])]
    counted = []
    for name in ("_update_stats_from_output", "_update_stats_from_finished"):
        setattr(engine.output_processor, name, lambda *args: counted.append(args))
    done = served.call(weir.warm_async(engine, *params, batch_sizes=[2]))
    assert done.tap_sets == 3 and done.graphs == 0 and not counted
    for name in ("_update_stats_from_output", "_update_stats_from_finished"):
        delattr(engine.output_processor, name)
    with pytest.raises(weir.WeirError, match="await warm_async"):
        weir.warm(engine, *params)
    with pytest.raises(weir.WeirError, match="layers"):
        served.call(weir.warm_async(engine, weir.params(capture=weir.Capture("resid_post", [77]))))

    async def busy():
        stream = engine.generate(prompts()[0], sampling(30), "warm-busy")
        await anext(stream)
        try:
            with pytest.raises(weir.WeirError, match="unfinished requests"):
                await weir.warm_async(engine, *params)
        finally:
            await stream.aclose()

    served.call(busy())
    verify(served.call(stream(engine, prompts()[0], asked, "warm-later"))[-1], wanted, truth)


def test_spans_of_requests_that_vllm_traces(served, monkeypatch):
    """Admission and capture of what Weir serves, in the client's trace and one after the other; nothing of others."""
    client, headers = 0x5F, {"traceparent": f"00-{0x5F:032x}-{0x7:016x}-01"}

    traces = recorded(monkeypatch)

    async def ask(**named):
        asked, _ = asking("all", LAYERS, max_tokens=4)
        wrong = weir.params(sampling(max_tokens=4), capture=[weir.Capture("resid_post", layers=[99])])
        for name, params in (("traced", asked), ("plain", sampling(max_tokens=4))):
            async for _ in served.engine.generate(prompts()[0], params, name, **named):
                pass
        with pytest.raises(ValueError, match="layers"):
            await stream(served.engine, prompts()[0], wrong, "refused")

    served.call(ask())
    assert not traces.get_finished_spans()
    processor = served.engine.output_processor
    monkeypatch.setattr(processor, "tracing_enabled", True)
    monkeypatch.setattr(processor, "do_tracing", lambda *_: None)  # vLLM's own span needs statistics
    monkeypatch.setattr(served.engine, "observability_config", SimpleNamespace(otlp_traces_endpoint="there"))
    served.call(ask(trace_headers=headers))
    spans = [span for span in traces.get_finished_spans() if span.name.startswith("weir_")]
    admission, capture, refused = spans
    assert [span.name for span in spans] == ["weir_admission", "weir_capture", "weir_admission"]
    assert admission.attributes == {"gen_ai.request.id": "traced"}
    assert capture.attributes["weir_rows"] > 0 < capture.attributes["weir_bytes"]
    assert {span.context.trace_id for span in (admission, capture)} == {client} and capture.parent.span_id == 7
    assert admission.start_time <= admission.end_time == capture.start_time < capture.end_time
    assert "layers" in refused.status.description and not refused.status.is_ok
