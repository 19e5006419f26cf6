"""Compression on CUDA: records are those of the plain rows, and only records cross the bus."""

from __future__ import annotations

import pytest
import torch

from tests.support.engines import get_llm
from tests.support.measure import rel_err
from tests.support.oracle import Oracle
from vllm_weir import codec
from vllm_weir.schema.compression import Compression

pytestmark = pytest.mark.gpu
METHODS = ["full8", "topk8", "fp16", "fp8", {"method": "rp8", "k": 64}]
LENGTHS = (1, 3, 17, 64, 100, 33, 8, 50)


def run(llm, how, max_tokens=24):
    """For each length a compressing request and its plain twin, all in one batch."""
    from vllm import SamplingParams

    import vllm_weir as weir

    base = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": [(7 * i + j) % 500 + 5 for j in range(n)]} for i, n in enumerate(LENGTHS)]
    asked = [weir.params(base, capture=weir.Capture("resid_post", compress=c)) for c in (how, None)]
    outs = llm.generate(prompts * 2, [asked[0]] * len(prompts) + [asked[1]] * len(prompts), use_tqdm=False)
    return list(zip(outs[: len(prompts)], outs[len(prompts) :]))


@pytest.mark.parametrize("graphs", ["full", "eager", "small ring"])
def test_records_are_those_of_the_rows(directory, graphs):
    """The twin is another request of the same batch: bf16 rows of equal tokens differ by rounding now and then, so
    decoded rows are compared within the method's own error, and rows of one block deep exactly."""
    more = {
        "full": {},
        "eager": {"enforce_eager": True},
        "small ring": {"additional_config": {"weir": {"buffer_bytes": 1 << 17}}},
    }
    arguments = {"enforce_eager": False, "dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 30} | more[graphs]
    llm = get_llm(directory, **arguments)
    for how in METHODS:
        compression = Compression.parse(how, "compress")
        for packed, plain in run(llm, how):
            if list(packed.outputs[0].token_ids) != list(plain.outputs[0].token_ids):
                continue  # two greedy paths that rounding has parted
            for site in plain.activations.sites:
                assert packed.activations.positions_of(*site).equal(plain.activations.positions_of(*site))
                rows = plain.activations[site]
                records, header = packed.activations.compressed(site)
                assert records.shape == (len(rows), compression.record_bytes(128))
                expected = codec.decode(codec.encode(rows, compression), header)
                got = packed.activations[site]
                near = torch.nn.functional.cosine_similarity(got.double(), expected.double(), dim=-1)
                assert near.min() > 0.98, (how, site, float(near.min()))


@pytest.mark.parametrize("how", ["full8", "topk8", {"method": "rp8", "k": 64}], ids=str)
def test_prompts_that_leave_the_ring_band_by_band(directory, how, monkeypatch):
    """Steps that do not fit the ring: plain rows are those of transformers, records those of the plain rows."""
    from vllm import SamplingParams

    import vllm_weir as weir
    from vllm_weir.worker.transfer.streamed_copy import StreamedCopy

    begin, streamed = StreamedCopy.begin, []

    def counting(self, plan, columns_of, listed):
        begin(self, plan, columns_of, listed)
        streamed.append((plan.rows, len(plan.records), len(plan.copies), self.stride))

    monkeypatch.setattr(StreamedCopy, "begin", counting)
    ring = 3 * 1024
    arguments = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 30, "max_num_batched_tokens": 384}
    settings = {"weir": {"buffer_bytes": ring * 128 * 4, "host_bytes": 1 << 30}}
    llm = get_llm(directory, enforce_eager=True, additional_config=settings, **arguments)
    compression, oracle = Compression.parse(how, "compress"), Oracle(directory)
    base = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    lengths = (1, 2, 5, 16, 40, 64, 100, 200)
    prompts = [{"prompt_token_ids": [(7 * i + j) % 500 + 5 for j in range(n)]} for i, n in enumerate(lengths)]
    wide = [weir.Capture(hook) for hook in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")]
    some = [weir.Capture("resid_post", positions="0::3")]
    asked = [weir.params(base, capture=captures) for captures in (wide, some)]
    packing = [
        weir.params(base, capture=[weir.Capture(c.hook, positions=c.positions, compress=how) for c in captures])
        for captures in (wide, some)
    ]
    every = [*zip(prompts * 2, [asked[0]] * 8 + [asked[1]] * 8), *zip(prompts * 2, [packing[0]] * 8 + [packing[1]] * 8)]
    outs = llm.generate([p for p, _ in every], [a for _, a in every], use_tqdm=False)
    assert any(rows > ring for rows, *_ in streamed), streamed
    assert any(packs and jobs for _, packs, jobs, _ in streamed), "none of the steps had both kinds"
    assert any(jobs and stride > 1 for _, _, jobs, stride in streamed), "no two columns left together"
    for plain, packed in zip(outs[:16], outs[16:]):
        ids = (list(plain.prompt_token_ids) + list(plain.outputs[0].token_ids))[:-1]
        exact = oracle.rows(ids)
        for site in plain.activations.sites:
            at = plain.activations.positions_of(*site)
            # Attention multiplies float32 in TF32 there; a row in a wrong place is off by its own size.
            assert rel_err(plain.activations[site], exact[tuple(site)][at]) <= 2e-2
            assert packed.activations.positions_of(*site).equal(at)
            header = packed.activations.compressed(site)[1]
            expected = codec.decode(codec.encode(plain.activations[site], compression), header)
            near = torch.nn.functional.cosine_similarity(packed.activations[site], expected, dim=-1)
            assert near.min() > 0.98, (site, float(near.min()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("k", [32, 64, 128, 100])
def test_records_of_rp8_are_within_half_a_step(k, dtype):
    """Of the exact projection of the same rows; where one kernel does it, a record does not depend on its batch."""
    from vllm_weir.worker.transfer.codec_kernels import PROJECTED
    from vllm_weir.worker.transfer.codecs import Codecs

    compression = Compression.parse({"method": "rp8", "k": k, "seed": 5}, "compress")
    codecs = Codecs(4096, torch.device("cuda", 0), dtype)
    rp8 = codecs[codecs.hold("a", compression)]
    rows = torch.randn(9000, 4096, generator=torch.Generator().manual_seed(0)).to(dtype).cuda()
    rows[1, 7], rows[2] = float("nan"), 0
    records = rp8.encode(rows)
    sums = rows.double() @ codec.projection(5, k, 4096).double().T.cuda()
    got = codec.project(records, compression.header(4096, str(dtype).removeprefix("torch.")))
    assert got[1].isnan().all() and not got[2].any()
    sound = [0, *range(3, 9000)]
    step = (sums.amax(1) - sums.amin(1))[sound] / 255
    assert ((got - sums)[sound].abs().amax(1) / step).max() <= 0.51
    if k in PROJECTED:
        for n in (3, 100, 5000):
            for spread in (None, True, False):
                assert rp8.encode(rows[:n], spread).equal(records[:n]), (n, spread)


def test_only_records_cross_the_bus(directory, monkeypatch):
    """Counted where the copy engine is told what to copy."""
    from vllm_weir.worker.transfer import copy_out

    moved = []
    copy = copy_out.copy_pieces

    def counting(targets, sources, sizes, stream):
        moved.append(int(sizes.sum()))
        copy(targets, sources, sizes, stream)

    monkeypatch.setattr(copy_out, "copy_pieces", counting)
    llm = get_llm(directory, enforce_eager=False, dtype="bfloat16", kv_cache_memory_bytes=1 << 30)
    from vllm import SamplingParams

    import vllm_weir as weir

    how = {"method": "rp8", "k": 64}
    base = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": [(5 * i + j) % 500 + 5 for j in range(40)]} for i in range(16)]
    asked = weir.params(base, capture=weir.Capture("resid_post", compress=how))
    outs = llm.generate(prompts, asked, use_tqdm=False)
    rows = sum(sum(out.receipt.captured.values()) for out in outs)
    record = Compression.parse(how, "c").record_bytes(128)
    assert sum(moved) == rows * record
    assert 4096 * 2 / Compression.parse(how, "c").record_bytes(4096) >= 60


def test_the_host_does_not_wait(directory):
    """No step of a compressing request synchronises the host with the device."""
    from vllm import SamplingParams

    import vllm_weir as weir

    llm = get_llm(directory, enforce_eager=False, dtype="bfloat16", kv_cache_memory_bytes=1 << 30)
    runtime = _runtime(llm)
    ship, calls = runtime.parts.step_rows.copy_out.ship, []

    def strict(*args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            calls.append(1)
            return ship(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runtime.parts.step_rows.copy_out.ship = strict
    try:
        base = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
        captures = [
            weir.Capture("resid_post", positions=p, compress={"method": "rp8", "k": 64}) for p in ("all", "3::2")
        ]
        asked = [weir.params(base, capture=c) for c in captures]
        llm.generate([{"prompt_token_ids": list(range(5, 25))}] * 2, asked, use_tqdm=False)
    finally:
        runtime.parts.step_rows.copy_out.ship = ship
    assert len(calls) >= 16


def _runtime(llm):
    """The station of an engine whose worker lives in this process."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    worker = getattr(worker, "worker", worker)
    return worker.weir_report.args[1]
