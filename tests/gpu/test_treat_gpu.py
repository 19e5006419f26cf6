"""Reductions, products with directions, and a full host buffer, on CUDA: made on the side stream, from the ring."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_graphs_gpu import engine
from tests.support.oracle import Oracle

pytestmark = pytest.mark.gpu
REDUCE = {"last": lambda x: x[-1:], "mean": lambda x: x.mean(0, keepdim=True), "max": lambda x: x.amax(0, keepdim=True)}
SELECTORS = {"all": slice(None), "prompt": None, "generated": None, "2:9": slice(2, 9)}
TOLERANCE = 5e-3


@pytest.fixture(scope="module")
def oracle(directory):
    return Oracle(directory)


def run(llm, captures, length=lambda k: 12 + 9 * k, tokens=7):
    """One request for each capture, of different lengths; in the same batch a plain one."""
    from vllm import SamplingParams

    import vllm_weir as weir

    base = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    params = [*(weir.params(base, capture=c) for c in captures), base]
    prompts = [{"prompt_token_ids": [5 + (7 * i + k) % 400 for i in range(length(k))]} for k in range(len(params))]
    return llm.generate(prompts, params, use_tqdm=False)[: len(captures)]


def wanted(out, selector, reference):
    P = len(out.prompt_token_ids)
    return reference[{"prompt": slice(0, P), "generated": slice(P, None)}.get(selector) or SELECTORS[selector]]


def reference_of(out, oracle):
    return oracle.rows((list(out.prompt_token_ids) + list(out.outputs[0].token_ids))[:-1])


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_reductions(directory, oracle, mode):
    import vllm_weir as weir

    llm = engine(directory, mode)
    cases = [(how, selector) for how in REDUCE for selector in SELECTORS]
    for _ in range(2):
        outs = run(llm, [weir.Capture("resid_post", positions=s, reduce=how) for how, s in cases])
        for out, (how, selector) in zip(outs, cases, strict=True):
            every = reference_of(out, oracle)
            for site in out.activations.sites:
                rows = wanted(out, selector, every[tuple(site)])
                got = out.activations[site]
                assert got.shape == (1, oracle.hidden_size)
                assert (got - REDUCE[how](rows)).abs().max() <= TOLERANCE * rows.abs().max(), (how, selector, site)


def test_products_with_directions(directory, oracle):
    import vllm_weir as weir

    llm = engine(directory)
    directions = torch.randn(3, oracle.hidden_size, generator=torch.Generator().manual_seed(0))
    cases = [(how, selector) for how in (None, *REDUCE) for selector in SELECTORS]
    outs = run(llm, [weir.Capture("resid_post", positions=s, project=directions, reduce=how) for how, s in cases])
    for out, (how, selector) in zip(outs, cases, strict=True):
        every = reference_of(out, oracle)
        for site in out.activations.sites:
            rows = wanted(out, selector, every[tuple(site)])
            scores = rows @ directions.T
            scores = scores if how is None else REDUCE[how](scores)
            got = out.activations[site]
            assert got.dtype == torch.float32 and got.shape == scores.shape
            bound = TOLERANCE * rows.norm(dim=1).max() * directions.norm(dim=1).max()
            assert (got - scores).abs().max() <= bound, (how, selector, site)


@pytest.mark.parametrize("width", [192, 2880, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_reduction_has_the_cpu_s_bits_however_the_prompt_was_cut(dtype, width):
    from tests.unit.worker.tap.test_reductions import Worker, content
    from vllm_weir.worker.tap.triton_kernel import launch

    asked = {"a": ("mean", "prompt", 700), "b": ("max", "1:300:3", 300), "c": ("mean", [0, 3, 130, -1], 200)}
    cuts = ([700, 300, 200],), ([1, 300, 3], [127, 0, 130], [400, 0, 67], [172, 0, 0])
    found = []
    for device, steps in (("cpu", cuts[0]), ("cuda", cuts[0]), ("cuda", cuts[1])):
        worker = Worker(dtype, device, width, *([launch] if device == "cuda" else []))
        for name, what in asked.items():
            worker.read(name, *what)
        at, got = dict.fromkeys(asked, 0), {}
        for counts in steps:
            batch = [(name, n, at[name]) for name, n in zip(asked, counts, strict=True) if n]
            got |= worker.step(batch, content)
            at = {name: at[name] + n for name, n in zip(asked, counts, strict=True)}
        found.append(got)
    for name in asked:
        first, *others = (got[name] for got in found)
        assert not first.isnan().any() and all(torch.equal(first, other) for other in others), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products_of_a_row_do_not_depend_on_the_others(dtype):
    from vllm_weir.worker.transfer.directions import Products

    draw = torch.Generator().manual_seed(0)
    rows, directions = torch.randn(3000, 4096, generator=draw).to(dtype), torch.randn(256, 4096, generator=draw)
    for m in (1, 2, 17, 256):
        made = Products(directions[:m].cuda())
        every = made.encode(rows.cuda()).view(torch.float32).cpu()
        parts = [made.encode(some.cuda()).view(torch.float32).cpu() for some in rows.split([1, 7, 45, 2947])]
        assert torch.equal(every, torch.cat(parts)), m
        want = rows.double() @ directions[:m].double().T
        # 4,096 terms: rounding grows with their magnitudes, not with the sum, in which they cancel.
        magnitudes = rows.double().abs() @ directions[:m].double().abs().T
        assert ((every.double() - want).abs() <= 1e-6 * magnitudes).all(), m


def test_a_full_host_buffer_drops_rows_and_says_so(directory, oracle, monkeypatch):
    """Rows that are there are right and in their places; the others are in the receipt."""
    import vllm_weir as weir
    from vllm_weir.frontend.receive.row_store import RowStore

    monkeypatch.setattr(RowStore, "_spill", lambda self, mapped: None)  # the reader would make room

    row = 4 * oracle.hidden_size
    host = {"host_bytes": 400 * oracle.num_layers * row, "overflow": "drop"}
    llm = engine(directory, additional_config={"weir": host})
    dropped = 0
    for _ in range(3):
        outs = run(llm, [weir.Capture("resid_post")] * 12, length=lambda k: 60)
        for out in outs:
            ids = (list(out.prompt_token_ids) + list(out.outputs[0].token_ids))[:-1]
            every, receipt = oracle.rows(ids), out.receipt
            for site in out.activations.sites:
                at = out.activations.positions_of(*site)
                assert len(at) == receipt.captured[site] == len(ids) - receipt.dropped.get(site, 0)
                dropped += receipt.dropped.get(site, 0)
                reference = every[tuple(site)]
                gap = (out.activations[site].float() - reference[at]).abs().max() if len(at) else 0
                assert gap <= TOLERANCE * reference.abs().max()
        del out, outs
    assert dropped, "the buffer was large enough: the test shows nothing"
