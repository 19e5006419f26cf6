"""Rows that leave the device compressed: exactly what encoding the plain rows of the same run gives."""

from __future__ import annotations

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import assert_nothing_is_held, directory, oracle, prompts, sampling, tokens
from tests.support.engines import get_llm
from tests.support.machine import on_cpu
from tests.support.steered import chunks
from vllm_weir import codec
from vllm_weir.schema.compression import Compression

pytestmark = pytest.mark.engine("default")
SELECTORS = ["all", "prompt", "generated", "last_prompt", "sampled", [0, 3, -1], "2:40:3", {"token_ids": [5, 6, 7, 8]}]
METHODS = ["full8", "topk8", "fp16", "fp8", {"method": "rp8", "k": 32, "seed": 7}, "rp8"]
D = 128


def asked(selector, compress, max_tokens=7, last=3, **more):
    captures = [
        weir.Capture("resid_post", [0, 2], selector, compress=compress),
        weir.Capture("resid_pre", [last], selector, compress=compress),
    ]
    return weir.params(sampling(max_tokens, **more), capture=captures)


def same(packed, plain, how):
    """`packed` holds the rows of `plain`, compressed: bit for bit, since both requests had the same kernels with the
    same shapes; random projections are sums, which are rounded another way in another batch."""
    how = Compression.parse(how, "compress")
    assert packed.sites == plain.sites
    for site in plain.sites:
        assert packed.positions_of(*site).equal(plain.positions_of(*site))
        assert packed.token_ids_of(*site).equal(plain.token_ids_of(*site))
        records, header = packed.compressed(site)
        assert records.dtype == torch.uint8 and records.shape == (len(plain[site]), how.record_bytes(D))
        assert header["method"] == how.method and packed[site].shape == plain[site].shape
        assert packed[site].dtype == torch.float32
        if not len(records):
            continue
        encoded = codec.encode(plain[site], how)
        decoded = codec.decode(encoded, header)
        if how.method == "rp8":  # a step of 8 bits, of which rounding may take the next
            assert (packed[site] - decoded).abs().max() <= 1e-2 * decoded.abs().max()
        elif not on_cpu():  # the twin's rows are rounded otherwise there, and may fall to the next step
            near = torch.nn.functional.cosine_similarity(packed[site].double(), decoded.double(), dim=-1)
            assert near.min() > 0.98
        else:
            assert records.equal(encoded)
            assert packed[site].equal(decoded.float())


@pytest.mark.parametrize("size", [None, 7])
def test_every_method_and_selector(llm, size):
    """In one batch, beside plain rows, with whole and with chunked prompts."""
    cases = [(selector, how) for selector in SELECTORS for how in METHODS]
    texts = prompts([5 + k for k in range(len(cases))])
    with chunks(llm, size):
        params = [asked(s, h) for s, h in cases] + [asked(s, None) for s, _ in cases]
        outs = llm.generate(texts * 2, params, use_tqdm=False)
    for out, twin, (_, how) in zip(outs, outs[len(cases) :], cases):
        same(out.activations, twin.activations, how)
        assert set(out.receipt.captured.values()) == set(twin.receipt.captured.values())
        assert out.receipt.compression == out.activations.compressed("resid_post", 0)[1]
        assert not out.receipt.dropped and twin.receipt.compression is None
    del out, outs, twin
    assert_nothing_is_held(llm)


def test_dtype_n_and_what_is_not_compressed(llm):
    capture = [
        weir.Capture("resid_post", 1, compress="full8", dtype="bfloat16"),
        weir.Capture("resid_post", 2, compress="full8"),
    ]
    params = weir.params(sampling(4, n=2, temperature=1.0, seed=3), capture=capture)
    plain = weir.params(sampling(4, n=2, temperature=1.0, seed=3), capture=weir.Capture("resid_post", [1, 2]))
    out, twin = llm.generate(prompts([9]) * 2, [params, plain], use_tqdm=False)
    for one, other in zip(out.outputs, twin.outputs):
        assert list(one.token_ids) == list(other.token_ids)
        assert one.activations["resid_post", 1].dtype == torch.bfloat16
        assert one.activations["resid_post", 2].dtype == torch.float32
        for layer in (1, 2):
            encoded = codec.encode(other.activations["resid_post", layer], Compression("full8"))
            assert one.activations.compressed("resid_post", layer)[0].equal(encoded)
        with pytest.raises(weir.WeirError, match="not compressed"):
            other.activations.compressed("resid_post", 1)
    none = weir.params(sampling(4), capture=weir.Capture("resid_post", 1, compress="none"))
    assert llm.generate(prompts([9]), none, use_tqdm=False)[0].receipt.compression is None


def test_prefix_hits(llm):
    prompt = {"prompt_token_ids": tokens(200, 77)}
    for selector, hits in (("generated", True), ("all", False), ("-4:", True)):
        out, twin = (llm.generate(prompt, asked(selector, how), use_tqdm=False)[0] for how in ("full8", None))
        again = llm.generate(prompt, asked(selector, "full8"), use_tqdm=False)[0]
        same(again.activations, twin.activations, "full8")
        assert (again.receipt.cached_tokens > 0) == hits
        if out.receipt.cached_tokens == twin.receipt.cached_tokens:  # else their steps had other shapes
            same(out.activations, twin.activations, "full8")


def test_streaming(llm):
    from vllm.sampling_params import RequestOutputKind

    whole = llm.generate({"prompt_token_ids": tokens(9)}, asked("all", "full8", 4), use_tqdm=False)[0].activations
    for kind in (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA):
        params = asked("all", "full8", 4)
        params.output_kind = kind
        llm.llm_engine.add_request("r", {"prompt_token_ids": tokens(9)}, params)
        parts = []
        while llm.llm_engine.has_unfinished_requests():
            parts += [o.activations.compressed("resid_post", 0)[0] for o in llm.llm_engine.step()]
        joined = torch.cat(parts) if kind is RequestOutputKind.DELTA else parts[-1]
        assert joined.equal(whole.compressed("resid_post", 0)[0])


def decoded(out, how, truth, D=D):
    """Every record decodes to the row that transformers computes, as well as the method can."""
    ids = list(out.prompt_token_ids) + list(out.outputs[0].token_ids)
    reference = truth.rows(ids[:-1], map(tuple, out.activations.sites))
    for site in out.activations.sites:
        rows = reference[tuple(site)][out.activations.positions_of(*site).numpy()].float()
        if len(rows):
            step = (rows.amax(1) - rows.amin(1)).max() / 255
            assert (out.activations[site] - rows).abs().max() <= 0.51 * step + 1e-4 * rows.abs().max()


def test_little_memory(root):
    """Host memory for 2,048 rows; a ring of 128 is in `test_batching`."""
    llm, truth = get_llm(directory(root), additional_config={"weir": {"host_bytes": 1 << 20}}), oracle(directory(root))
    for out in llm.generate(prompts([100] * 10), asked("all", "full8", 30), use_tqdm=False):
        decoded(out, "full8", truth)


def test_less_leaves_the_worker(llm):
    """Records lie next to each other: the host memory in use is theirs, not that of the rows."""
    used = {}
    for how in (None, {"method": "rp8", "k": 32}):
        outs = llm.generate(prompts([200]), asked("prompt", how, 1), use_tqdm=False)
        used[how is None] = sum(u["host_rows"] for u in llm.collective_rpc("weir_usage"))
        del outs
        assert_nothing_is_held(llm)  # the next is measured alone
    record = Compression.parse({"method": "rp8", "k": 32}, "c").record_bytes(D)
    assert used[False] <= used[True] * record / (4 * D) * 1.1 + 1


@pytest.mark.parametrize(
    ("captures", "field"),
    [
        ([{"compress": "zip"}], "capture[0].compress"),
        ([{"compress": ["rp8"]}], "capture[0].compress"),
        ([{"compress": {"method": "rp8", "k": 10**6}}], "capture[0].compress"),
        ([{"compress": {"method": "topk8", "k": 4000}}], "capture[0].compress"),
        ([{"compress": "full8", "reduce": "mean"}], "capture[0].compress"),
        ([{"compress": "full8", "project": torch.ones(D)}], "capture[0].compress"),
        ([{"layers": 0, "compress": "full8"}, {"layers": 1}], "capture[1].compress"),
        ([{"layers": 0, "compress": "full8"}, {"layers": 1, "compress": "rp8"}], "capture[1].compress"),
        ([{"layers": 0, "compress": "full8"}, {"layers": 1, "reduce": "mean"}], "capture[1].compress"),
    ],
)
def test_what_cannot_be_done_is_refused(llm, captures, field):
    with pytest.raises(weir.WeirError) as e:
        llm.generate(prompts([4]), weir.params(sampling(2), capture=captures), use_tqdm=False)
    assert e.value.field.startswith(field)
    assert not llm.llm_engine.has_unfinished_requests()
