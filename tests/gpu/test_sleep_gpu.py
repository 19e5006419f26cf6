"""``enable_sleep_mode`` on CUDA: what Weir holds on the device survives a sleep, and live graphs replay afterwards.

vLLM discards what it has allocated in pools of its own (weights, KV cache); Weir's tensors are in none of them. Its
allocator serves one engine a process, so each engine here has processes of its own.
"""

from __future__ import annotations

import gc

import pytest
import torch

import vllm_weir as weir
from tests.conformance.oracle import Oracle
from tests.gpu.test_capture_gpu import GRAPHS, engine
from tests.support.measure import eventually, rel_err

pytestmark = pytest.mark.gpu
BOUND, BLOCK = 5e-3, 2  # attention in float32 rounds its products as TF32 there
IDS = [[(7 * n + 3 * j + j * j) % 200 + 5 for j in range(length)] for n, length in enumerate((40, 9, 70))]


@pytest.fixture(scope="module", params=GRAPHS)
def llm(request):
    return engine(weir.demo_model(), request.param, in_process=False, dtype="float32", enable_sleep_mode=True)


def vector(width: int) -> torch.Tensor:
    return 2 * torch.randn(width, generator=torch.Generator().manual_seed(3))


def test_capture_and_steering_survive(llm):
    """Both levels, twice: the first keeps the weights on the host, after the second they are loaded again."""
    from vllm import SamplingParams

    truth = Oracle(weir.demo_model())
    base = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    weir.register(llm, "kept", vector(truth.hidden_size))
    weir.load_sae(llm, "mood", weir.demo_sae())
    asked = [
        weir.params(base, capture=weir.Capture("resid_post")),
        base,
        weir.params(base, capture=weir.Capture("resid_post"), interventions=weir.Add("kept", BLOCK)),
    ]
    prompts = [{"prompt_token_ids": ids} for ids in IDS]

    def check():
        for _ in range(3):  # live graphs are captured on the spot, then replayed
            outs = llm.generate(prompts, asked, use_tqdm=False)
            for n in (0, 2):
                ids = [*IDS[n], *outs[n].outputs[0].token_ids][:-1]
                change = vector(truth.hidden_size) if n else torch.zeros(truth.hidden_size)
                rows, _ = truth.steer(ids, "resid_post", BLOCK, change)
                for site in outs[n].activations.sites:
                    assert rel_err(outs[n].activations[site], rows[tuple(site)]) <= BOUND, (n, site)
        features = weir.params(base, features=weir.Features("mood", top_k=4))
        (out,) = llm.generate(prompts[:1], features, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in outs], out.features["mood"]

    tokens, before = check()
    for level in (1, 2, 1, 2):
        llm.sleep(level)
        if level == 2:
            llm.wake_up(tags=["weights"])
            llm.collective_rpc("reload_weights")
            llm.wake_up(tags=["kv_cache"])
        else:
            llm.wake_up()
        again, after = check()
        assert again == tokens
        assert torch.equal(after.ids, before.ids) and rel_err(after.values, before.values) <= BOUND
    assert list(weir.list_vectors(llm)) == ["kept"] and [one.name for one in weir.saes(llm)] == ["mood"]
    weir.unload_sae(llm, "mood")
    weir.unregister(llm, "kept")


@pytest.mark.parametrize("level", [0, 1])
def test_requests_under_way_are_aborted(llm, level):
    """Those that wait for the device tables too; the tables have room for the next ones."""
    from vllm import SamplingParams

    base = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    for n in range(8):
        asked = weir.params(base, interventions=weir.Add(vector(256) * (n + 1), BLOCK))
        llm.llm_engine.add_request(f"r{n}", {"prompt_token_ids": IDS[0]}, asked)
    llm.llm_engine.step()
    llm.sleep(level, mode="abort")
    llm.wake_up()
    # vLLM ends them in the engine alone, and the caller has to give them up.
    llm.llm_engine.abort_request([f"r{n}" for n in range(8)])
    assert not llm.llm_engine.has_unfinished_requests()
    asked = weir.params(base, capture=weir.Capture("resid_post", BLOCK))
    (out,) = llm.generate([{"prompt_token_ids": IDS[0]}], asked, use_tqdm=False)
    assert len(out.activations["resid_post", BLOCK]) == len(IDS[0]) + 63
    del out

    def held():
        gc.collect()
        # The worker learns of the last finished request, and which rows are free, with the next.
        llm.generate([{"prompt_token_ids": IDS[1]}], base, use_tqdm=False)
        return [
            (name, used)
            for worker in llm.collective_rpc("weir_usage")
            for name, used in worker.items()
            if used and name != "sae_bytes"
        ]

    eventually(held, [], 5)
