"""Activations whose sites have rows of different shapes."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

from tests.unit.refusals import refused
from tests.unit.stored import shaped_rows
from vllm_weir import Activations, Site, WeirError
from vllm_weir.client.response_fields import activations_of
from vllm_weir.codec import encode
from vllm_weir.results.activations import CompressedRows
from vllm_weir.schema.compression import Compression

N = 5


def activations(rows):
    at = torch.arange(N) * 2
    sites = [Site(*site) for site in rows]
    return Activations({s: rows[s] for s in sites}, dict.fromkeys(sites, at), dict.fromkeys(sites, at + 100))


def assert_same(got: Activations, rows) -> None:
    assert [tuple(site) for site in got.sites] == list(rows)
    for site, expected in rows.items():
        assert got[site].dtype == expected.dtype and got[site].shape == expected.shape, site
        assert torch.equal(got[site], expected), site
    assert got.positions.tolist() == [0, 2, 4, 6, 8]


def with_patterns():
    """Rows of `SHAPES`, and scores and patterns over keys, of which later ones have no value."""
    rows = shaped_rows(N)
    scores = torch.randn(N, 6, N).masked_fill(torch.ones(N, N).triu(1).bool()[:, None], -torch.inf)
    return rows | {("attn_scores", 1): scores, ("pattern", 1): scores.softmax(-1).bfloat16()}


def test_every_way_out_keeps_the_shapes(tmp_path) -> None:
    rows = with_patterns()
    acts = activations(rows)
    assert_same(acts, rows)
    path = acts.save(tmp_path / "x.safetensors")
    assert_same(Activations.load(path), rows)
    assert acts.to_bytes() == path.read_bytes()
    assert_same(activations_of(acts.to_bytes()), rows)  # as a client reads it
    assert_same(pickle.loads(pickle.dumps(acts)), rows)  # noqa: S301
    assert acts.to_dict()["q", 1].shape == (N, 6, 32)
    assert acts.numpy("expert_ids", 1).dtype == "int64" and acts.numpy("q.1").shape == (N, 6, 32)
    assert repr(acts).startswith("Activations(resid_post[1]: [5, 48], q[1]: [5, 6, 32], k[1]: [5, 2, 32], mlp_post[1]:")


def test_sites_without_rows(tmp_path) -> None:
    rows = {site: rows[:0] for site, rows in shaped_rows(N).items()} | {("pattern", 1): torch.zeros(0, 6, 0)}
    none = dict.fromkeys((Site(*site) for site in rows), torch.zeros(0, dtype=torch.int64))
    acts = Activations({Site(*site): r for site, r in rows.items()}, none, none)
    got = Activations.load(acts.save(tmp_path / "x.safetensors"))
    assert {site: got[site].shape for site in rows} == {site: r.shape for site, r in rows.items()}


def test_compressed_rows_of_heads() -> None:
    site, how = Site("z", 1), Compression("full8")
    rows = torch.randn(N, 4, 8)
    at = {site: torch.arange(N)}
    header = how.header(32, "float32", (4, 8))
    acts = Activations({}, at, at, (), CompressedRows(header, {site: encode(rows.flatten(1), how)}, {site: "float32"}))
    assert acts[site].shape == (N, 4, 8)
    spread = rows.flatten(1).amax(1) - rows.flatten(1).amin(1)
    assert ((acts[site] - rows).flatten(1).abs().amax(1) <= spread / 255 / 2 * 1.001).all()


@pytest.mark.parametrize("shape", [(4, 9), (32,), (), (4, 8, 0), (4.0, 8), (True, 32), "ab", 5, [[4], 8], (-4, -8)])
def test_a_header_with_another_shape_is_refused(shape) -> None:
    good = Compression().header(32, "float32", (4, 8))
    assert good["shape"] == [4, 8] and "shape" not in Compression().header(32, "float32")
    assert Compression.from_header(good) == Compression()
    with refused("header.shape"):
        Compression.from_header(good | {"shape": list(shape) if isinstance(shape, tuple) else shape})


def test_only_plain_rows_are_integers() -> None:
    (values,) = Compression().header(2, "int64")["fields"]
    assert values == {"name": "values", "dtype": "int64", "shape": [2], "offset": 0}
    with pytest.raises(WeirError, match="rows are float32, float16, bfloat16, not 'int64'"):
        Compression("full8").header(2, "int64")


def test_tensors_in_a_file_are_aligned(tmp_path) -> None:
    """Whatever the dtypes and the numbers of values: some readers map a file."""
    rows = {
        Site("expert_weights", 0): torch.randn(3, 1).bfloat16(),
        Site("resid_post", 0): torch.randn(3, 5),
        Site("expert_ids", 1): torch.tensor([[1], [2], [3]]),
    }
    at = dict.fromkeys(rows, torch.arange(3))
    acts = Activations(rows, at, at)
    data = acts.save(tmp_path / "x.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name, entry in header.items():
        if name != "__metadata__":
            itemsize = {"I64": 8, "F32": 4, "BF16": 2}[entry["dtype"]]
            assert (8 + length + entry["data_offsets"][0]) % itemsize == 0, name
    got = Activations.load(tmp_path / "x.safetensors")
    assert got.sites == list(rows) and all(torch.equal(got[site], rows[site]) for site in rows)
