"""The host never waits for the device in a step: what torch calls a synchronisation is an error while Weir plans,
taps and ships. (The device would then wait for the host, once a step.)"""

from __future__ import annotations

import pytest
import torch

from tests.support.engines import get_llm
from tests.support.measure import rel_err
from tests.support.oracle import Oracle

pytestmark = pytest.mark.gpu


@pytest.fixture
def strict(monkeypatch):
    """Names of what has run under torch's debug mode for synchronisations."""
    from vllm_weir.worker.steps import Steps
    from vllm_weir.worker.transfer.streamed_copy import StreamedCopy

    ran: set[str] = set()

    def hold(owner, name):
        original = getattr(owner, name)

        def wrapper(*args, **kwargs):
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                return original(*args, **kwargs)
            finally:
                ran.add(name)
                torch.cuda.set_sync_debug_mode(before)

        monkeypatch.setattr(owner, name, wrapper)

    for owner, name in (
        (Steps, "plan_step"),
        (Steps, "end_step"),
        (StreamedCopy, "begin"),
        (StreamedCopy, "tap"),
    ):
        hold(owner, name)
    return ran


def test_the_debug_mode_notices_a_copy_from_memory_that_is_not_pinned():
    from vllm_weir.util.h2d import upload

    array = torch.arange(1000).numpy()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError):
            torch.from_numpy(array).to("cuda")
        moved = upload(array, torch.device("cuda", 0))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert moved.tolist() == array.tolist() and upload(array[:0], torch.device("cuda", 0)).tolist() == []


def test_nothing_waits_for_the_device(directory, strict):
    """Streamed steps and others; rows as they are, packed, reduced and multiplied; steering, also by sampled tokens."""
    from vllm import SamplingParams

    import vllm_weir as weir

    ring = 3 * 1024
    settings = {"weir": {"buffer_bytes": ring * 128 * 4, "host_bytes": 1 << 30}}
    arguments = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 30, "max_num_batched_tokens": 384}
    llm = get_llm(directory, enforce_eager=True, additional_config=settings, **arguments)
    base = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    v = torch.randn(128, generator=torch.Generator().manual_seed(0))
    capture, names = weir.Capture, ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
    whole = [
        weir.params(base, capture=capture("resid_post", reduce="mean")),
        weir.params(base, capture=capture("resid_post", project=v[None])),
    ]
    others = [
        weir.params(base, capture=[capture(hook) for hook in names]),
        weir.params(base, capture=capture("resid_post", compress={"method": "rp8", "k": 64})),
        weir.params(base, capture=capture("resid_post", positions="0::3", compress="topk8")),
        weir.params(base, interventions=weir.Add(v, layers=[1], scale=0.5)),
        weir.params(base, interventions=weir.Add(v, layers=[1], scale=0.5, positions={"token_ids": [7, 11, 12, 19]})),
        weir.params(base, capture=capture("resid_post"), interventions=weir.Ablate(v, layers=[0])),
        base,
    ]
    for asked in (whole, others, whole + others):  # a step in which something is made of whole rows is not streamed
        prompts = [{"prompt_token_ids": [(7 * i + j) % 500 + 5 for j in range(20 + 20 * i)]} for i in range(len(asked))]
        for _ in range(2):
            outs = llm.generate(prompts, asked, use_tqdm=False)
    assert strict == {"plan_step", "end_step", "begin", "tap"}
    out = outs[len(whole)]
    ids = (list(out.prompt_token_ids) + list(out.outputs[0].token_ids))[:-1]
    exact = Oracle(directory).rows(ids)
    assert len(out.activations.sites) > 4
    for site in out.activations.sites:
        assert rel_err(out.activations[site], exact[tuple(site)]) <= 2e-2
