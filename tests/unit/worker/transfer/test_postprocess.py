"""Compressing a step's rows: whatever lies between them in the ring, each token's records go to its place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.properties import examples
from vllm_weir import WeirError, codec
from vllm_weir.schema.compression import Compression
from vllm_weir.worker.planning.columns import RECORD, ROW_COPY
from vllm_weir.worker.planning.step_plan import StepPlan
from vllm_weir.worker.transfer import codecs as codecs_module
from vllm_weir.worker.transfer.codecs import MAX_IDLE, Codec, Codecs
from vllm_weir.worker.transfer.pinned_buffer import _split
from vllm_weir.worker.transfer.postprocess import Postprocessor

D, RING = 16, 400
HOW = Compression.parse("full8", "compress")
NONE = np.zeros(0, np.int64)


def plan_of(packs):
    return StepPlan(NONE, NONE, NONE, 0, NONE, np.zeros(0, ROW_COPY), records=np.array(packs, RECORD))


@examples(60)
@given(
    tokens=st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 2), st.integers(0, 1), st.booleans()), min_size=1, max_size=20
    ),
    chunk=st.sampled_from([1 << 24, 5 * D, 1]),
)
def test_records_go_to_their_places(tokens, chunk):
    """Tokens of (columns, ring rows before it that are not packed, codec, whether its place follows the last one's)."""
    ring = torch.randn(RING, D, generator=torch.Generator().manual_seed(0))
    codecs = Codecs(D, torch.device("cpu"))
    numbers = [codecs.hold(f"r{k}", Compression.parse(how, "c")) for k, how in enumerate(("full8", "fp16"))]
    record = [codecs[n].record_bytes for n in numbers]
    packs, expected, at, place = [], {}, 7, 3
    for columns, gap, which, follows in tokens:
        at, place = at + gap, place if follows else place + 11
        size = columns * record[which]
        packs.append((at - 7, place, size, columns, numbers[which]))
        rows = ring[at : at + columns]
        expected[place] = codec.encode(rows, codecs[numbers[which]].compression, None).view(-1)
        at, place = at + columns, place + size
    host = torch.zeros(place + 1, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codecs_module, "MAX_VALUES", chunk)
        plan, treater = plan_of(packs), Postprocessor(ring)
        quick, other = (treater.pack(plan, 7, codecs, quick) for quick in (True, False))
    for packets, which in ((quick, 0), (other, 1)):
        assert all(p.records.shape[-1] == record[which] for p in packets), "each codec has its turn"
    packets = [*quick, *other]
    assert sum(int(p.pieces[:, 2].sum()) for p in packets) == sum(len(e) for e in expected.values())
    for packet in packets:
        flat = packet.records.view(-1)
        for source, target, size in packet.pieces.tolist():
            host[target : target + size] = flat[source : source + size]
    for start, bytes_ in expected.items():
        assert host[start : start + len(bytes_)].equal(bytes_)


def test_nothing_to_pack():
    nothing, codecs = plan_of([]), Codecs(D, torch.device("cpu"))
    assert all(Postprocessor(torch.zeros(4, D)).pack(nothing, 0, codecs, quick) == [] for quick in (True, False))


def test_one_piece_for_what_lies_together():
    codecs = Codecs(D, torch.device("cpu"))
    number = codecs.hold("r", HOW)
    size = 3 * codecs[number].record_bytes
    packs = [(3 * k, 100 + size * k, size, 3, number) for k in range(50)]
    (packet,) = Postprocessor(torch.randn(RING, D)).pack(plan_of(packs), 0, codecs, True)
    assert packet.pieces.tolist() == [[0, 100, 50 * size]]


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 70)), min_size=1, max_size=5))
def test_pieces_are_cut_at_block_edges(targets):
    pieces = np.array([(1000 * k, place, size) for k, (place, size) in enumerate(targets)], np.int64)
    parts = _split(pieces, 32)
    assert (parts[:, 1] // 32 == (parts[:, 1] + parts[:, 2] - 1) // 32).all()
    whole = [(s + k, t + k) for s, t, n in pieces.tolist() for k in range(n)]
    assert sorted((s + k, t + k) for s, t, n in parts.tolist() for k in range(n)) == sorted(whole)


def test_codecs_are_counted_and_a_few_idle_ones_kept():
    codecs = Codecs(64, torch.device("cpu"))
    hows = [Compression.parse({"method": "rp8", "k": 32, "seed": s}, "c") for s in range(MAX_IDLE + 3)]
    numbers = [codecs.hold(f"r{k}", how) for k, how in enumerate(hows)]
    assert len(set(numbers)) == len(hows) and codecs.hold("again", hows[0]) == numbers[0]
    codecs.release("nobody")
    for k in range(len(hows)):
        codecs.release(f"r{k}")
    assert codecs.hold("again", hows[0]) == numbers[0], "it was in use all the time"
    assert codecs.hold("last", hows[-1]) == numbers[-1], "just used"
    assert codecs.hold("first", hows[1]) not in numbers, "forgotten, and made again"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", ["full8", {"method": "rp8", "k": 64, "seed": 3}], ids=str)
def test_a_kernel_that_packs_wrongly_is_noticed(how, dtype):
    """Before anything is packed with it."""
    compression, d, cpu = Compression.parse(how, "compress"), 256, torch.device("cpu")
    matrix = codec.projection(3, 64, d) if compression.method == "rp8" else None

    class Kernel(Codec):
        spoil = staticmethod(lambda records: None)

        def encode(self, rows, spread=None):
            records = super().encode(rows, spread)
            self.spoil(records)
            return records

    kernel = Kernel(compression, matrix, None, compression.record_bytes(d), d)
    kernel.check_kernel(dtype, cpu)
    wrong = {
        "a code": lambda r: r[5, 8 + 7].add_(3),
        "a scale": lambda r: r[3, :4].view(torch.float32).mul_(1.05),
        "a smallest value": lambda r: r[3, 4:8].view(torch.float32).add_(1.0),
        "a row": lambda r: r[4].copy_(r[5].clone()),
        "no mark": lambda r: r[1].copy_(r[2].clone()),
        "a mark": lambda r: r[6, :4].view(torch.float32).fill_(torch.nan),
    }
    for name, spoil in wrong.items():
        Kernel.spoil = staticmethod(spoil)
        with pytest.raises(WeirError, match="does not agree with the plain code"):
            kernel.check_kernel(dtype, cpu)
            pytest.fail(name)
    other = replace(kernel, projection=None if matrix is None else codec.projection(4, 64, d))
    Kernel.spoil = staticmethod(lambda records: None)
    if matrix is not None:
        with pytest.raises(WeirError, match="ask for another compression"):
            other.check_kernel(dtype, cpu)


@pytest.mark.parametrize("wrong", [True, False])
def test_either_way_of_a_projecting_kernel_is_tried(wrong):
    class Kernel(Codec):
        def encode(self, rows, spread=None):
            return super().encode(rows).add_(3 * (spread is wrong))

    compression, d = Compression.parse({"method": "rp8", "k": 64, "seed": 3}, "compress"), 256
    matrix = codec.projection(3, 64, d)
    arguments = (compression, matrix, matrix, compression.record_bytes(d), d)
    Codec(*arguments).check_kernel(torch.bfloat16, torch.device("cpu"))
    with pytest.raises(WeirError, match="does not agree with the plain code"):
        Kernel(*arguments).check_kernel(torch.bfloat16, torch.device("cpu"))
