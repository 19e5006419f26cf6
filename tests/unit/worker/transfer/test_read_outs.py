"""The codec of read-outs against the autoencoder itself: columns, wide rows, parts of columns, ties."""

from __future__ import annotations

import torch

from tests.support.sae_reference import weights
from vllm_weir.sae.autoencoder import SAE
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.read_outs import FEATURES, LENS, ReadOut, RecordLayout
from vllm_weir.schema.taps import column_of
from vllm_weir.util.top import top_values
from vllm_weir.worker.lenses import Lenses, Unembedding
from vllm_weir.worker.transfer.codecs import Codecs
from vllm_weir.worker.transfer.read_outs import ReadOuts

D, WIDE = 24, 60
CPU = torch.device("cpu")
STREAM, NEURONS = Site("resid_post", 1), Site("mlp_post", 2)
COLUMNS = (column_of(STREAM, False), *[column_of(NEURONS, False)] * 3)
HEAD = torch.randn(D, 50, generator=torch.Generator().manual_seed(5))


def sae_of(site: Site, width: int) -> SAE:
    return SAE.from_tensors("standard", site, **weights("standard", 1, width, 96))


SAES = {"a": sae_of(STREAM, D), "b": sae_of(NEURONS, WIDE)}
READ_OUTS = (
    ReadOut(FEATURES, STREAM, "a", 4),
    ReadOut(FEATURES, NEURONS, "b", 0, (9, 2)),
    ReadOut(LENS, STREAM, "", 3),
)


def store() -> tuple[ReadOuts, Codecs]:
    codecs = Codecs(D, CPU)
    lenses = Lenses(Unembedding(lambda rows: rows @ HEAD, 50, ""), 4, D, CPU)
    return ReadOuts(codecs, lambda _request, key: SAES[key], {NEURONS: (WIDE,)}, D, CPU, lenses, 4), codecs


def test_records_of_several_columns():
    read_outs, codecs = store()
    codec = codecs[read_outs.hold("r", READ_OUTS, False)(COLUMNS)]
    rows = torch.randn(7, 4, D, generator=torch.Generator().manual_seed(2))
    layout = RecordLayout.of(READ_OUTS)
    assert layout.record_bytes == codec.record_bytes == 8 * 4 + 8 * 3
    records = codec.encode(rows.flatten(0, 1)).view(7, 4, -1)
    stream, neurons = records[:, 0].contiguous(), records[:, 1].contiguous()
    ids, values = top_values(SAES["a"].encode(rows[:, 0]), 4)
    assert torch.equal(stream[:, :16].contiguous().view(torch.int32).long(), ids)
    assert torch.equal(stream[:, 16:32].contiguous().view(torch.float32), values)
    expected = SAES["b"].encode(rows[:, 1:].flatten(1)[:, :WIDE])[:, [9, 2]]
    assert torch.equal(neurons[:, :8].contiguous().view(torch.float32), expected)
    logprobs = (rows[:, 0] @ HEAD).log_softmax(1).topk(3)
    assert torch.equal(stream[:, 32:44].contiguous().view(torch.int32).long(), logprobs.indices)
    assert torch.allclose(stream[:, 44:].contiguous().view(torch.float32), logprobs.values, atol=1e-5)


def test_columns_in_parts_give_the_same_records():
    """As a streamed step has them, whose strips hold some of a token's columns."""
    read_outs, codecs = store()
    codec = codecs[read_outs.hold("r", READ_OUTS, False)(COLUMNS)]
    rows = torch.randn(5, 4, D)
    parts = [codec.encode_columns(rows[:, :1], 0), codec.encode_columns(rows[:, 1:], 1)]
    assert torch.equal(torch.cat(parts, 1).flatten(0, 1), codec.encode(rows.flatten(0, 1)))


def test_rows_that_are_sent_too_begin_their_records():
    read_outs, codecs = store()
    rows = torch.randn(5, 4, D)
    alone, beside = (codecs[read_outs.hold("r", READ_OUTS, rows_too)(COLUMNS)] for rows_too in (False, True))
    layouts = RecordLayout.of(READ_OUTS), RecordLayout.of(READ_OUTS, 4 * D)
    assert {one: at + 4 * D for one, at in layouts[0].offsets.items()} == layouts[1].offsets
    assert beside.record_bytes == alone.record_bytes + 4 * D == layouts[1].record_bytes
    for first, end in ((0, 4), (0, 1), (1, 4)):  # also in strips
        part = rows[:, first:end]
        records = beside.encode_columns(part, first)
        assert torch.equal(records[:, :, : 4 * D].contiguous().view(torch.float32), part)
        assert torch.equal(records[:, :, 4 * D :], alone.encode_columns(part, first))
    odd = torch.randn(5, 1, 3).bfloat16()
    assert RecordLayout.of(READ_OUTS, odd.itemsize * 3).offsets[READ_OUTS[0]] == 8  # int32 begin at whole ones


def test_requests_share_a_codec_until_the_last_leaves():
    read_outs, codecs = store()
    number = read_outs.hold("r", READ_OUTS, False)(COLUMNS)
    assert read_outs.hold("s", READ_OUTS, False)(COLUMNS) == number
    assert read_outs.hold("t", READ_OUTS[:1], False)(COLUMNS) != number
    read_outs.release("r")
    assert codecs[number]
    read_outs.release("s")
    read_outs.release("t")
    assert not codecs._codecs


def test_ties_come_by_index():
    values = torch.tensor([[0.0, 2.0, -0.0, 2.0, 0.0, -1.0], [-3.0, -3.0, -5.0, -2.0, float("inf"), -3.0]])
    ids, top = top_values(values, 5)
    assert ids.tolist() == [[1, 3, 0, 2, 4], [4, 3, 0, 1, 5]]
    assert torch.equal(top, values.gather(1, ids))


def test_what_is_read_together_goes_to_its_own_column():
    """Untranslated lenses of all blocks are read in one product."""
    sites = [STREAM, Site("resid_post", 2), Site("resid_post", 3)]
    read_outs, codecs = store()
    asked = tuple(ReadOut(LENS, site, "", 3) for site in sites)
    codec = codecs[read_outs.hold("r", asked, False)(tuple(column_of(site, False) for site in sites))]
    rows = torch.randn(5, 3, D, generator=torch.Generator().manual_seed(4))
    records = codec.encode_columns(rows, 0)
    for k in range(3):
        ids = records[:, k, :12].contiguous().view(torch.int32).long()
        assert torch.equal(ids, (rows[:, k] @ HEAD).topk(3).indices)
