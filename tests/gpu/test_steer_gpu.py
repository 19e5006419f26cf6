"""Steering on CUDA: the Triton tap against the CPU op, and runner V2 with CUDA graphs against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.engines import close_all, get_llm
from tests.support.steered import SteeredOracle

pytestmark = pytest.mark.gpu


def shipped(graphs=None, **more):
    import vllm_weir as weir

    arguments = {"enforce_eager": False, "dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 30} | more
    return get_llm(weir.demo_model(), **arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d_model", [96, 256, 4096])
@pytest.mark.parametrize("beside", [("residual", 1.0, 1.0), ("residual", 1.3, 0.7), ("offset", 0.8, 0.8)], ids=str)
def test_the_triton_tap_equals_the_cpu_op(d_model, dtype, beside):
    from vllm_weir.schema.engine_traits import TableSizes
    from vllm_weir.schema.instructions import ResolvedIntervention
    from vllm_weir.schema.interventions import Ablate, Add, Clamp, LowRank, Replace
    from vllm_weir.worker.steering.programs import ActiveIntervention, ProgramTable
    from vllm_weir.worker.tap.op import TapSwitch, TapTensors, numbered

    rng = np.random.default_rng(0)
    v = lambda *s: rng.standard_normal(s).astype(np.float32)
    items = [
        Add(v(d_model), 1, 2.0),
        Add(v(d_model), 1, 0.5, hook="resid_pre", norm_match=True),
        Add(v(d_model), 0, 2.0, keep_norm=True),
        Add(v(d_model), 0, 0.5, norm_match=True, keep_norm=True),
        Ablate(v(3, d_model), 0),
        Clamp(v(d_model), 0, value=2.0),
        Clamp(v(d_model), 0, min=-0.1, max=0.1, strength=0.5),
        Replace(v(d_model), 0, 0.3),
        LowRank(v(4, d_model) / 60, v(4, d_model) / 60, v(4), 0),
    ]
    table = ProgramTable(TableSizes(64, 64, 512), 3, range(3), d_model)
    numbers = [-1]
    for _ in range(12):
        chosen = [items[i] for i in rng.permutation(len(items))[: rng.integers(1, 5)]]
        active, rows = [], {}
        for item in chosen:
            low = item.lower((d_model,), None)
            rows.update(low.rows)
            one = ResolvedIntervention(item.hook, item.layers, item.positions, False, low.instructions)
            active.append(ActiveIntervention(one, one.digest, -1))
        table.hold_vectors(list(rows), lambda digests, rows=rows: {x: rows[x] for x in digests})
        numbers.append(table.hold(active)[1])
    n = 64
    plan = torch.tensor([[-1, -1, -1, 0]] * 80, dtype=torch.int32)
    plan[:n, 0] = torch.arange(n, dtype=torch.int32) * 3
    plan[:n, 1] = 0
    plan[::5, 0] = -1
    plan[:n, 2] = torch.tensor(rng.choice(numbers, n), dtype=torch.int32)
    ranks = torch.full((4, 9), -1, dtype=torch.int32)
    ranks[0, 3:6] = torch.arange(3, dtype=torch.int32)
    hidden, residual = (torch.from_numpy(v(n, d_model)).to(dtype) for _ in range(2))
    kind, scale, other_scale = beside
    if kind == "offset":
        residual = residual[:1].expand(n, d_model)
    results = []
    for device in ("cpu", "cuda"):
        h, r = (tensor.to(device, copy=True) for tensor in (hidden, residual))
        ring = torch.zeros(3 * n, d_model, dtype=dtype, device=device)
        tables = [torch.from_numpy(getattr(table, name)).to(device) for name in ("heads", "ints", "floats", "vectors")]
        number = numbered(1, scale, other_scale, kind == "offset", device)
        cells = torch.zeros(len(plan), 1, device=device)
        switch = TapSwitch(TapTensors(plan.to(device), ranks.to(device), ring, *tables, cells))
        switch.activate_always()
        switch.register(number, 1)
        getattr(torch.ops.weir, f"tap_{kind}")(h, r, number)
        results.append([x.cpu().float() for x in (h, r, ring)])
    for ours, theirs in zip(*results, strict=True):
        most = theirs.abs().max()
        # One bf16 step is 2^-8 of the value; float32 sums differ by their order only.
        assert (ours - theirs).abs().max() <= (most / 128 if dtype == torch.bfloat16 else 2e-6 * most * d_model**0.5)
    plain = plan[:n, 2] < 0
    assert torch.equal(results[1][0][plain], hidden[plain].float()) and torch.equal(
        results[1][1][plain], residual[plain].float()
    )


def cases(d_model):
    import vllm_weir as weir

    g = torch.Generator().manual_seed(1)
    v = lambda *s: torch.randn(*s, generator=g)
    return [
        [weir.Add(v(d_model), 3, 4.0)],
        [weir.Add(v(d_model), [1, 3], 2.0, positions="generated")],
        [weir.Add(v(d_model), 2, 0.1, norm_match=True)],
        [weir.Add(v(d_model), 3, 2.0, hook="resid_pre")],
        [weir.Add(v(1, d_model), [1, 3], 2.0, keep_norm=True)],
        [weir.Add({1: v(d_model), 3: v(1, d_model)}, scale=0.1, norm_match=True, keep_norm=True)],
        [weir.Add(v(2, d_model), [3, 1], 2.0, per_layer=True)],
        [weir.Ablate(v(3, d_model), "all")],
        [weir.Clamp(v(d_model), 2, value=3.0)],
        [weir.Replace(v(d_model), 1, positions=[2, -1], alpha=0.2)],
        [weir.LowRank(v(4, d_model) / 40, v(4, d_model) / 40, v(4), 2)],
        [weir.Add(v(d_model), 1, 2.0), weir.Ablate(v(d_model), 1), weir.Clamp(v(d_model), 3, min=-1.0, max=1.0)],
        [],
    ]


def test_greedy_tokens_equal_hooked_transformers():
    """The shipped model in bf16 with CUDA graphs; transformers eagerly, hooked, in fp32 on the same bf16 weights."""
    from vllm import SamplingParams

    import vllm_weir as weir
    from examples.demo.stories import make_stories

    llm = shipped()
    assert llm.collective_rpc("weir_report")[0]["runner"] == "V2"
    oracle = SteeredOracle(weir.demo_model())
    programs = cases(oracle.hidden_size)
    # Two sentences settle what the story is about; where nothing does, greedy decoding is a coin toss in any precision.
    texts = [" ".join(story.sentences[:3]) for story in make_stories(40, 3)]
    base = SamplingParams(max_tokens=64, temperature=0)
    params = [weir.params(base, interventions=programs[i % len(programs)]) for i in range(len(texts))]
    outs = llm.generate(texts, params, use_tqdm=False)
    close_all()  # graphs captured in this process and another model's memory do not mix
    oracle.model.cuda()
    equal, kinds = 0, {}
    for i, out in enumerate(outs):
        prompt, got = list(out.prompt_token_ids), list(out.outputs[0].token_ids)
        want = oracle.steered_greedy(prompt, len(got), programs[i % len(programs)])
        equal += want == got
        kinds.setdefault(i % len(programs), []).append(want == got)
    print(f"\nbf16 greedy: {equal}/{len(outs)} generations equal; by program {[sum(v) for v in kinds.values()]}")
    assert equal >= 0.95 * len(outs)


def test_the_change_is_the_asked_one_to_bf16_rounding():
    from vllm import SamplingParams

    import vllm_weir as weir

    llm = shipped()
    d = llm.collective_rpc("weir_report")[0]["d_model"]
    v = torch.randn(d, generator=torch.Generator().manual_seed(2))
    params = weir.params(
        SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
        capture=[weir.Capture("resid_post", 2), weir.Capture("resid_pre", 3)],
        interventions=weir.Add(v, 3, 3.0, hook="resid_pre"),
    )
    out = llm.generate(["Anna went to the harbor."], params, use_tqdm=False)[0]
    before, after = out.activations["resid_post", 2], out.activations["resid_pre", 3]
    assert torch.equal(after, (before.float() + 3.0 * v).to(torch.bfloat16))
    assert out.receipt.steered == ({weir.Site("resid_pre", 3): len(before)},)


def test_a_turned_row_keeps_its_norm_to_bf16_rounding():
    from vllm import SamplingParams

    import vllm_weir as weir

    llm = shipped()
    d = llm.collective_rpc("weir_report")[0]["d_model"]
    v = torch.randn(d, generator=torch.Generator().manual_seed(3))
    for norm_match, scale in ((False, 3.0), (True, 0.7)):
        params = weir.params(
            SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
            capture=[weir.Capture("resid_post", 2), weir.Capture("resid_pre", 3)],
            interventions=weir.Add(v, 3, scale, hook="resid_pre", norm_match=norm_match, keep_norm=True),
        )
        out = llm.generate(["Anna went to the harbor."], params, use_tqdm=False)[0]
        before = out.activations["resid_post", 2].double()
        after = out.activations["resid_pre", 3].double()
        norm = before.norm(dim=1, keepdim=True)
        summed = before + scale * (norm * v.double() / v.double().norm() if norm_match else v.double())
        want = summed * norm / summed.norm(dim=1, keepdim=True)
        # One bf16 step is 2^-8 of an element, rounding errs by half of it at most.
        assert ((after - want).abs() <= want.abs() / 256 + 1e-6 * norm).all()
        assert ((after.norm(dim=1) - norm[:, 0]).abs() <= norm[:, 0] / 256).all()
        assert out.receipt.steered == ({weir.Site("resid_pre", 3): len(before)},)


def test_neighbours_are_bit_identical(directory):
    """Plain requests beside capturing and steered ones, and what captures, have the numbers that they have alone."""
    from vllm import SamplingParams

    import vllm_weir as weir

    llm = get_llm(
        directory, enforce_eager=False, dtype="bfloat16", kv_cache_memory_bytes=1 << 30, enable_prefix_caching=False
    )
    g = torch.Generator().manual_seed(0)
    prompts = [{"prompt_token_ids": [(11 * i + j) % 500 + 5 for j in range(20 + i)]} for i in range(32)]
    plain = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=5)
    capturing = weir.params(plain, capture=weir.Capture("resid_post"))
    steered = [weir.params(plain, interventions=weir.Add(torch.randn(128, generator=g), "all", 1.0)) for _ in prompts]
    alone = llm.generate(prompts, plain, use_tqdm=False)
    # Captures alone do not make steps live in the same way as steering does.
    for asked in ([plain, capturing], [plain, steered, capturing, steered]):
        params = [one[i] if isinstance(one := asked[i % len(asked)], list) else one for i in range(32)]
        for i, (a, b) in enumerate(zip(alone, llm.generate(prompts, params, use_tqdm=False), strict=True)):
            same = a.outputs[0].token_ids == b.outputs[0].token_ids and a.outputs[0].logprobs == b.outputs[0].logprobs
            assert same == (asked[i % len(asked)] is not steered)
