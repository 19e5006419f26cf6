"""A thousand requests of every kind, each aborted at a random moment, leave nothing, and the next ones are exact."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import (
    asking,
    directory,
    frontend,
    oracle,
    prompts,
    sampling,
    scheduler,
    tokens,
    verify,
)
from tests.engine.probe_cases import D
from tests.support.census import census, grown
from tests.support.draft_models import drafting
from tests.support.engines import get_llm
from tests.support.machine import on_cpu
from tests.support.measure import eventually
from tests.support.sae_reference import weights
from vllm_weir import consumers
from vllm_weir.consumers import Consumer
from vllm_weir.frontend.receive.score_table import KEPT
from vllm_weir.frontend.sinks.mark_buffer import MAX_ENDED
from vllm_weir.patches.cuda_graph_sets import MAX_REMEMBERED, MAX_SETS
from vllm_weir.schema.selectors import MOST_STEPS, _shared

pytestmark = pytest.mark.engine
CASES = [  # kind of engine, requests
    pytest.param(("plain", 240), id="plain"),
    pytest.param(("plain", 1000), id="plain, a thousand", marks=pytest.mark.thorough),
    pytest.param(("ngram", 240), id="ngram", marks=pytest.mark.thorough),
]
LIVE = 24
"""Requests that are under way at a time."""
STEPS = 12
"""No request lives for more steps than this, and none would end within them."""
MADE = 60
SETTINGS = {"max_programs": 24, "sinks": {"kept": {"ledger": {}}}}
"""Room for the programs of a few steered requests, so that some are aborted while they wait for it."""
MAX_GRAPHS = 2 * 64 * (MAX_SETS + 2)
"""Live graphs at most: two modes of so many sizes, for particular taps and for all."""
BOUNDED = {
    "GraphSets._captured": MAX_GRAPHS,
    "GraphSets._late_captures": MAX_GRAPHS,
    "GraphSets._substitutes": MAX_REMEMBERED,
    "LiveGraph": 2 * MAX_REMEMBERED,
    "MarkBuffer._ended": MAX_ENDED,
    "ScoreSeries._series": 2 * KEPT,
    "Selectors._runs": 64 * MOST_STEPS,
    "Selectors._counts": 64 * MOST_STEPS,
}
"""What remembers something of requests that have gone, up to a number: sizes of steps whose CUDA graph was asked for,
or captured, requests that cannot be marked, late scores, and what selectors choose of a step, each of which keeps
`MOST_STEPS`."""


class Ledger(Consumer):
    """Knows the sequences that it was given rows of and that have neither finished nor been aborted."""

    open_names: ClassVar[set[str]] = set()

    def take(self, rows: Any) -> None:
        Ledger.open_names.add(rows.request.name)

    def finish(self, request: Any) -> tuple[()]:
        Ledger.open_names.discard(request.name)
        return ()

    def abort(self, request: Any) -> None:
        Ledger.open_names.discard(request.name)


@pytest.fixture(params=CASES)
def llm(root, request, monkeypatch):
    monkeypatch.setitem(consumers._SHIPPED, "ledger", f"{__name__}:Ledger")
    model_dir = directory(root)
    more = {} if request.param[0] == "plain" else {"speculative_config": drafting(model_dir, "ngram")}
    llm = get_llm(
        model_dir, block_size=32, max_num_seqs=16, max_num_batched_tokens=128,
        additional_config={"weir": SETTINGS}, **more,
    )  # fmt: skip
    weir.load_sae(llm, "sae", weir.SAE.from_tensors("jumprelu", ("resid_post", 1), name="sae",
                                                    **weights("jumprelu", 0, D, 256)))  # fmt: skip
    weir.register_probe(llm, probe("named", 9))
    weir.register(llm, "vector", vector(8))
    yield llm
    weir.unload_sae(llm, "sae")
    weir.unregister_probe(llm, "named")
    weir.unregister(llm, "vector")


def vector(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed))


def probe(name: str, seed: int, layer: int = 1, **more: Any) -> weir.Probe:
    return weir.Probe(name, 0.05 * vector(seed, 1), torch.zeros(1), "resid_post", layer, **more)


def kinds() -> dict[str, dict[str, Any]]:
    """What a request of each kind asks, and how it is sampled."""
    add = weir.Add(vector(1), [1, 2], 2.0)
    gate = weir.When("p", above=0.0, latch=True)
    gated = weir.Add(vector(1), 2, 1.0, positions="generated", when=gate)
    return {
        "plain": {},
        "every row": {"capture": weir.Capture()},
        "inside": {"capture": [weir.Capture("mlp_post", 2, "generated"), weir.Capture("z", 1, heads=[0, 3])]},
        "derived": {"capture": weir.Capture("pattern", 1, "last_prompt")},
        "compressed": {"capture": weir.Capture("resid_post", compress="full8")},
        "projected": {"capture": weir.Capture("resid_post", [1], project=vector(2, 3))},
        "reduced": {"capture": [weir.Capture(layers=[0], reduce="mean"), weir.Capture(layers=[2], reduce="last")]},
        "steered": {"interventions": [add, weir.Ablate(vector(3), [3], positions="generated")]},
        "steered by position": {
            "interventions": weir.Add(vector(4, 4), [1], 1.0, positions=[0, 2, 5, 8]),
            "capture": weir.Capture("resid_mid", 2),
            "dose": True,
        },
        "by name": {"interventions": weir.Add("vector", [0]), "probes": "named"},
        "probed": {"probes": [probe("p", 5), probe("q", 6, smooth=("mean", 5)), probe("r", 7, 3, smooth=("max",))]},
        "stopped": {"probes": probe("p", 5), "stop_when": "p > 1e6"},
        "gated": {"probes": probe("p", 5), "interventions": gated},
        "features": {"features": weir.Features("sae", top_k=4)},
        "a feature set": {"interventions": weir.SetFeature("sae", 3, scale=2.0), "capture": weir.Capture(layers=2)},
        "lens": {"lens": weir.Lens(layers=[2], top_k=3)},
        "to a sink": {"capture": weir.Capture("resid_post", [1, 2], sink="kept")},
        "to a sink of its own": {"capture": weir.Capture("resid_pre", 1, sink={"ledger": {}})},
        "to a sink if marked": {"capture": weir.Capture("resid_post", [2], sink="kept", keep="marked")},
        "three sequences": {"capture": weir.Capture(layers=[1]), "interventions": add, "n": 3},
    }


def params_of(kind: dict[str, Any], max_tokens: int) -> Any:
    asked = dict(kind)
    more = {"n": asked.pop("n"), "temperature": 1.0} if "n" in asked else {}
    return weir.params(sampling(max_tokens, **more), **asked) if asked else sampling(max_tokens)


def run_each(llm: Any, asked: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """What a short request of each kind gives, one after the other; nothing of them is held."""
    found = {}
    for name, params in asked.items():
        llm.reset_prefix_cache()
        (out,) = llm.generate(prompts([40]), params, use_tqdm=False)
        found[name] = given(out)
        if name == "to a sink if marked":
            for ticket in weir.mark(out.request_id, llm=llm):
                ticket.wait(60)
    return found


def given(out: Any) -> dict[str, torch.Tensor]:
    """An output's tokens and copies of its rows and numbers; of sequences that are drawn, how many rows they have."""
    if len(out.outputs) > 1:
        lengths = [(len(one.token_ids), len(one.activations["resid_post", 1])) for one in out.outputs]
        return {"drawn": torch.tensor(lengths)}
    found = {"tokens": torch.tensor(out.outputs[0].token_ids)}
    if getattr(out, "activations", None) is not None:
        found |= {str(site): out.activations[site].clone() for site in out.activations.sites}
    found |= {f"scores {name}": scores.clone() for name, scores in (getattr(out, "scores", None) or {}).items()}
    for name, features in (getattr(out, "features", None) or {}).items():
        found |= {f"ids {name}": features.ids.clone(), f"values {name}": features.values.clone()}
    for layer, read in (getattr(out, "lens", None) or {}).items():
        found |= {f"lens {layer}": read.token_ids.clone()}
    return found


def abort_all(llm: Any, asked: dict[str, Any], count: int) -> Counter[tuple[str, int]]:
    """Start requests of all kinds and abort each after a random number of steps; return the moments."""
    engine, draw = llm.llm_engine, random.Random(31)
    names = [name for name in asked for _ in range(count // len(asked))]
    draw.shuffle(names)
    live: list[list[Any]] = []
    moments: Counter[tuple[str, int]] = Counter()
    while names or live:
        while names and len(live) < LIVE:
            name, number = names.pop(), len(names)
            request = f"{name} {number}"
            prompt = {"prompt_token_ids": tokens(9 + number % 60, number % 5)}
            internal = engine.add_request(request, prompt, asked[name])
            after = draw.randrange(STEPS)
            live.append([after, after, name, internal if number % 2 else request, bool(number % 2)])
        for entry in [entry for entry in live if not entry[0]]:
            live.remove(entry)
            _, after, name, request, internal = entry
            engine.abort_request([request], internal=internal)
            moments[name, after] += 1
        for out in engine.step():
            assert not out.finished or out.outputs[0].finish_reason == "abort", out.request_id
        for entry in live:
            entry[0] -= 1
    while engine.has_unfinished_requests():
        engine.step()
    return moments


def usage(llm: Any) -> list[dict[str, int]]:
    return [dict(held) for held in llm.collective_rpc("weir_usage")]


def settle(llm: Any) -> None:
    """Wait until the last requests have ended in the worker and in the threads that receive and write rows, too."""
    llm.reset_prefix_cache()
    llm.llm_engine.step()
    gc.collect()
    with pytest.raises(weir.WeirError):  # requests that were abandoned are forgotten with the next that is looked up
        weir.mark("nobody", llm=llm)
    eventually(lambda: Ledger.open_names, set(), 5)
    eventually(lambda: len(frontend(llm).store), 0, 5)
    held = lambda: [(name, n) for one in usage(llm) for name, n in one.items() if n and name != "sae_bytes"]
    eventually(held, [], 5)
    assert not llm.llm_engine.output_processor.request_states and not scheduler(llm).requests


def free_blocks(llm: Any) -> int:
    return scheduler(llm).kv_cache_manager.block_pool.get_num_free_blocks()


def close(name: str, got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether numbers are the same but for rounding: on a GPU kernels round by how many rows a step has.

    Numbers of 8 bits may fall to the next step there.
    """
    bound = 1e-5 if on_cpu() else 2 / 127 if name == "compressed" else 1e-3
    return torch.allclose(got.double(), wanted.double(), rtol=bound, atol=bound * float(wanted.abs().max()))


def test_a_thousand_aborted_requests_leave_nothing(root, llm, request):
    truth, count = oracle(directory(root)), request.node.callspec.params["llm"][1]
    _shared.cache_clear()  # selectors of the requests of other engines of this process
    short, endless = ({name: params_of(kind, n) for name, kind in kinds().items()} for n in (6, MADE))
    wanted = run_each(llm, short)
    abort_all(llm, endless, count)  # caches and tables grow to their size
    settle(llm)
    threads, files, blocks = threading.active_count(), len(os.listdir("/proc/self/fd")), free_blocks(llm)
    before = census()

    moments = abort_all(llm, endless, count)
    assert sum(moments.values()) == count and len({after for _, after in moments}) == STEPS

    settle(llm)
    assert free_blocks(llm) == blocks
    assert threading.active_count() == threads and len(os.listdir("/proc/self/fd")) == files
    more = grown(before, census())
    assert {name: n for name, n in more.items() if n[1] > BOUNDED.get(name, 0)} == {}
    got = run_each(llm, short)
    for name, values in wanted.items():
        assert got[name].keys() == values.keys(), name
        for part, value in values.items():
            assert close(name, got[name][part], value), (name, part)
    params, sites = asking("all", truth.num_layers)
    (last,) = llm.generate(prompts([64]), params, use_tqdm=False)
    verify(last, sites, truth)
    del last
    settle(llm)
