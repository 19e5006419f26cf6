"""Datasets: every layout gives back what went in, lazily and by request, site and position."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.unit.refusals import refused
from tests.unit.stored import PROMPT, SITES, D, check, length_of, make, rows_of, tokens_of, write
from vllm_weir import analysis
from vllm_weir.codec import decode, encode
from vllm_weir.errors import WeirError
from vllm_weir.results.activations import Activations
from vllm_weir.schema.compression import METHODS, Compression
from vllm_weir.schema.hooks import Site
from vllm_weir.storage import LAYOUTS, Batch, convert, inspect, load, open_writer
from vllm_weir.storage.atomic_file import LocalFiles
from vllm_weir.storage.verify import verify

NAMES = ["a", "b/../c", "ü" * 40, "req-3", "0"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_goes_in_comes_out(layout: str, tmp_path: Path) -> None:
    make(tmp_path / "ds", layout, NAMES)
    dataset = load(tmp_path / "ds")
    check(dataset, NAMES)
    assert dataset.layout == layout
    assert dataset.count() == 3 * sum(map(length_of, NAMES))
    assert dataset.header == Compression().header(D, "bfloat16")
    assert not [f for f in os.listdir(tmp_path) if f != "ds"]  # no name reached out of the folder
    check(pickle.loads(pickle.dumps(dataset)), NAMES)  # noqa: S301  (workers get it so)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_records_are_kept_to_the_bit(layout: str, method: str, tmp_path: Path) -> None:
    compression = Compression(method, 32 if method in ("rp8", "topk8") else None, 4 if method == "rp8" else 0)
    make(tmp_path / "device", layout, ["a", "b"], compress=compression)
    rows = rows_of("a", "resid_post", 3, length_of("a"))
    header = compression.header(D, "bfloat16")
    with open_writer(tmp_path / "worker", layout) as writer:  # packed already, as a worker sends them
        writer.write(
            Batch("a", "resid_post", 3, np.arange(len(rows)), tokens_of(len(rows)), encode(rows, compression), header)
        )
        writer.finish_request("a")
    expected = decode(encode(rows, compression), header)
    for name in ("device", "worker"):
        dataset = load(tmp_path / name)
        assert dataset.header == header
        got = dataset["a"]["resid_post", 3]
        assert got.dtype == (torch.bfloat16 if method == "none" else torch.float32)
        if method != "rp8":
            assert torch.equal(got.float(), expected)
        else:  # matrix products of other shapes round otherwise, which may move a code by one
            torch.testing.assert_close(got, expected, rtol=0, atol=0.1)
            assert dataset.rows(("resid_post", 3), "a", space="projected").rows.shape == (len(rows), 32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_by_site_request_and_position(layout: str, tmp_path: Path) -> None:
    make(tmp_path, layout, ["b", "a", "c"])
    dataset = load(tmp_path)
    order = dataset.requests
    everything = dataset.rows(("resid_post", 3))
    expected = torch.cat([rows_of(r, "resid_post", 3, length_of(r)) for r in order])
    assert torch.equal(everything.rows, expected)
    assert [order[i] for i in everything.request_index.unique_consecutive().tolist()] == order
    assert everything.token_ids.tolist() == [t for r in order for t in tokens_of(length_of(r)).tolist()]
    for selector, wanted in [
        ("last_prompt", [PROMPT - 1]), ("prompt", range(PROMPT)), ([0, -1], [0, PROMPT - 1]), ("-2:", None), (2, [2]),
        ({"token_ids": [4, 7]}, [1, 2]), ([99], []), ("1::2", None),
    ]:  # fmt: skip
        got = dataset.rows("blocks.3.hook_resid_post", ["c"], selector)
        n = length_of("c")
        at = {"-2:": range(PROMPT - 2, n), "1::2": range(1, n, 2)}[selector] if wanted is None else wanted
        assert got.positions.tolist() == list(at), selector
        assert len(got) == len(list(at))
        assert torch.equal(got.rows, rows_of("c", "resid_post", 3, n)[list(at)])  # [0, d] if there are none
    for site in ("resid_post.3", "resid_post[3]", Site("resid_post", 3)):  # as files and receipts have it, and `str`
        assert torch.equal(dataset.rows(site).rows, expected) and dataset.count(site) == len(expected)
        assert torch.equal(dataset["c"][site], rows_of("c", "resid_post", 3, length_of("c")))
        assert len(dataset.torch(site)) == len(dataset.torch(("resid_post", 3)))
        assert dataset["c"].numpy(site).dtype == np.float32  # what is kept is bfloat16
    with pytest.raises(KeyError, match="no resid_mid"):
        dataset.rows(("resid_mid", 3))
    with pytest.raises(KeyError, match="no request 'zz'"):
        dataset["zz"]


def test_rows_chosen_by_token_need_tokens(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        for name, tokens in (("known", [7, 8, 7]), ("unknown", [-1] * 3)):
            writer.write(Batch(name, "resid_post", 3, [0, 1, 2], torch.tensor(tokens), torch.ones(3, D)))
            writer.finish_request(name)
    dataset = load(tmp_path)
    for selector, positions in (({"token_ids": [7]}, [0, 2]), ({"not_token_ids": [7]}, [1])):
        assert dataset.rows(("resid_post", 3), "known", selector).positions.tolist() == positions
        with refused(f"positions.{next(iter(selector))}", "request 'unknown' was stored without token ids"):
            dataset.rows(("resid_post", 3), positions=selector)
    with refused("positions.modality", "does not say where a prompt's images are"):
        dataset.rows(("resid_post", 3), positions={"modality": "image"})
    for special, key in ((True, "'token_ids'"), (False, "'not_token_ids'")):
        with refused("positions.special", f"{key}: tokenizer.all_special_ids"):
            dataset.rows(("resid_post", 3), positions={"special": special})
    with pytest.raises(WeirError, match="an empty list"):
        dataset.rows(("resid_post", 3), positions=[])


def test_sites_may_be_named_by_tensors(tmp_path: Path) -> None:
    make(tmp_path, "sharded", ["a"])
    dataset = load(tmp_path)
    for three in (np.int64(3), np.array(3), torch.tensor(3)):
        acts = dataset["a"]
        assert torch.equal(acts["resid_post", three], acts["resid_post", 3]) and ("resid_post", three) in acts
        assert torch.equal(acts.positions_of("resid_post", three), acts.positions)
        assert torch.equal(acts.token_ids_of("post_block", three), acts.token_ids)
        assert torch.equal(dataset.rows(("resid_post", three)).rows, acts["resid_post", 3])
        with pytest.raises(KeyError, match=r"resid_post\[4\] was not captured"):
            acts["resid_post", three + 1]


def test_positions_that_count_from_the_prompts_end_need_its_length(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        write(writer, "a", finish=False)
        writer.finish_request("a")
    dataset = load(tmp_path)
    assert dataset.rows(("resid_post", 3), positions="2:4").positions.tolist() == [2, 3]
    for selector in ("last_prompt", "-2:", [-1]):
        with pytest.raises(WeirError, match="prompt_tokens"):
            dataset.rows(("resid_post", 3), positions=selector)


def test_nothing_is_decoded_before_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "sharded", ["a"])
    reads = []
    dataset = load(tmp_path)
    real = type(dataset).read
    monkeypatch.setattr(type(dataset), "read", lambda *a: reads.append(a) or real(*a))
    acts = dataset["a"]
    assert ("resid_post", 3) in acts and acts.positions_of("resid_post", 3).numel() and not reads
    acts["resid_post", 3]
    assert len(reads) == 1


def test_batches_may_come_in_any_order_and_shape(tmp_path: Path) -> None:
    rows = rows_of("a", "resid_post", 3, 10)
    wide = torch.randn(10, 2, D).bfloat16()
    wide[:, 1] = rows
    for layout in LAYOUTS:
        with open_writer(tmp_path / layout, layout) as writer:
            for part in ([4, 5], [9], [0, 3, 1, 2], [8, 7], [], [6]):
                writer.write(Batch("a", "post_block", 3, part, torch.tensor(part) * 3 + 1, wide[part, 1]))
            writer.finish_request("a")
        acts = load(tmp_path / layout)["a"]
        assert torch.equal(acts["resid_post", 3], rows) and acts.positions.tolist() == list(range(10))


def test_the_callers_memory_may_be_used_again_at_once(tmp_path: Path) -> None:
    for layout in LAYOUTS:
        with open_writer(tmp_path / layout, layout) as writer:
            buffer = torch.empty(length_of("a"), D, dtype=torch.bfloat16)
            for hook, layer in SITES:
                buffer.copy_(rows_of("a", hook, layer, len(buffer)))
                writer.write(Batch("a", hook, layer, np.arange(len(buffer)), tokens_of(len(buffer)), buffer))
            buffer.zero_()
            writer.finish_request("a", {"prompt_tokens": PROMPT, "text": "a"})
        check(load(tmp_path / layout), ["a"])


def test_other_programs_can_read_the_files(tmp_path: Path) -> None:
    make(tmp_path / "one", "per_request", ["a"])
    acts = Activations.load(tmp_path / "one" / "a.safetensors")
    assert torch.equal(acts["resid_post", 3], rows_of("a", "resid_post", 3, length_of("a")))

    make(tmp_path / "many", "sharded", ["a", "b"])
    table = pq.read_table(tmp_path / "many" / "manifest.parquet").to_pylist()
    run = next(r for r in table if r["request"] == "b" and r["hook"] == "resid_post" and r["layer"] == 3)
    raw = (tmp_path / "many" / run["file"]).read_bytes()[run["offset"] :][: run["rows"] * run["stride"]]
    rows = torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).view(run["rows"], D)
    assert torch.equal(rows, rows_of("b", "resid_post", 3, length_of("b"))[run["position"]])
    with safe_open(tmp_path / "many" / run["file"], "pt") as file:
        assert file.get_tensor("rows").shape == (sum(r["rows"] for r in table if not r["finished"]), D)

    make(tmp_path / "packs", "packed", ["a", "b"])
    (pack,) = (tmp_path / "packs").glob("pack-*")
    assert torch.equal(load_file(pack)["1/resid_post.3"], rows_of("b", "resid_post", 3, length_of("b")))

    make(tmp_path / "npz", "npz", ["a"], compress="full8")
    with np.load(tmp_path / "npz" / "req_a" / "seq0_layer3_rank0.npz", allow_pickle=False) as data:
        values = data["q"].astype(np.float32) * data["scale"] + data["zero"]  # Vllm_mi_patch's own inverse
    rows = rows_of("a", "resid_post", 3, length_of("a"))
    full8 = Compression("full8")
    assert torch.equal(torch.from_numpy(values), decode(encode(rows, full8), full8.header(D, "bfloat16")))


def test_a_request_of_the_npz_layout_may_be_opened_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its folder or a copy of it, it is what it was in its dataset, with its metadata and its hook points."""
    for run in ("one", "two"):
        make(tmp_path / run, "npz", ["a b", "c"])
        (tmp_path / run / "weir.json").unlink()
    for name in ("a b", "c"):
        folder = next(f for f in (tmp_path / "one").iterdir() if f.name.startswith(f"req_{name[0]}"))
        dataset = load(folder)
        check(dataset, [name])
        assert dataset.index.layout == "npz" and not dataset.index.notes
    check(load(tmp_path / "one"), ["a b", "c"])
    both = load(tmp_path)
    assert sorted(both.requests) == ["one/a b", "one/c", "two/a b", "two/c"]
    assert {str(both.metadata(r)["text"]) for r in both.requests} == {"a b", "c"}

    alone = tmp_path / "one" / "req_c"
    (alone / "manifest.json").write_text("{")
    with pytest.raises(WeirError, match=r"req_c/manifest.json: damaged"):
        load(alone)
    (alone / "manifest.json").unlink()
    monkeypatch.chdir(alone / "resid_pre")
    whole = load(alone)
    assert [tuple(s) for s in whole["req_c" if "req_c" in whole.requests else "request"].sites] == list(SITES)
    for one in (".", alone / "resid_pre", "seq0_layer0_rank0.npz", alone / "resid_pre" / "seq0_layer0_rank0.npz"):
        (acts,) = load(one).values()
        assert torch.equal(acts["resid_pre", 0], rows_of("c", "resid_pre", 0, length_of("c"))), one


@pytest.mark.parametrize("name", ["a::b", "a[b]*?", "a b#c%20", "s3:", "~ünï"])
def test_a_local_folder_may_have_any_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (tmp_path / name, str(tmp_path / "deep" / name), name):
        with open_writer(place, "sharded") as writer:
            if not writer.holds("a"):
                write(writer, "a")
        assert (tmp_path / place / "weir.json").is_file()
        check(load(place), ["a"])
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "deep"])


def test_sites_of_different_kinds_in_one_dataset(tmp_path: Path) -> None:
    for layout in LAYOUTS:
        with open_writer(tmp_path / layout, layout) as writer:
            for name, dtype, d in (("a", torch.bfloat16, D), ("b", torch.float32, D), ("c", torch.float32, D + 1)):
                rows = rows_of(name, "resid_post", 3, 4, d, dtype)
                writer.write(Batch(name, "resid_post", 3, np.arange(4), np.arange(4), rows))
                writer.finish_request(name)
        dataset = load(tmp_path / layout)
        assert len(dataset.headers) == 3
        with pytest.raises(WeirError, match="3 kinds"):
            _ = dataset.header
        got = dataset.rows(("resid_post", 3), ["a", "b"])
        assert got.rows.dtype == torch.float32
        assert torch.equal(got.rows[4:], rows_of("b", "resid_post", 3, 4, D, torch.float32))
        with pytest.raises(WeirError, match="differ in width"):
            dataset.rows(("resid_post", 3))
        assert dataset["c"]["resid_post", 3].shape == (4, D + 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("compress", [None, "full8", {"method": "rp8", "k": 32}])
def test_a_site_without_rows_is_there(layout: str, compress: object, tmp_path: Path) -> None:
    """Asked for, and at no position that was reached; also when all of a file is such sites."""
    none, some = torch.zeros(0, D, dtype=torch.bfloat16), rows_of("a", "resid_post", 3, 4)
    with open_writer(tmp_path / "to", layout, compress=compress) as writer:
        for name in ("a", "b"):
            for _ in range(3):
                writer.write(Batch(name, "resid_post", 5, [], [], none))
            if name == "a":
                writer.write(Batch("a", "resid_post", 3, [], [], none))
                writer.write(Batch("a", "resid_post", 3, np.arange(4), np.arange(4), some))
            writer.finish_request(name, {"prompt_tokens": 4})
        writer.write(Batch("c", "resid_post", 5, [], [], none))
        writer.abandon("c")
    with open_writer(tmp_path / "to", layout) as writer:
        assert writer.holds("b") and not writer.holds("c")
    convert(tmp_path / "to", tmp_path / "packed", "packed")
    convert(tmp_path / "packed", tmp_path / "again", layout)
    convert(tmp_path / "to", tmp_path / "fp8", layout, compress="fp8", again=True)
    dtype = torch.bfloat16 if compress is None else torch.float32
    for place in ("to", "again", "fp8"):
        dataset = load(tmp_path / place)
        assert dataset.sites == [Site("resid_post", 3), Site("resid_post", 5)] and sorted(dataset) == ["a", "b"]
        assert dataset.metadata("b") == {"prompt_tokens": 4} and not list((tmp_path / place).rglob(".*"))
        kind = torch.float32 if place == "fp8" else dtype
        for rows in (
            dataset["a"]["resid_post", 5], dataset["b"]["resid_post", 5], dataset.rows(("resid_post", 5)).rows,
            dataset.rows(("resid_post", 3), []).rows, dataset.rows(("resid_post", 3), "b").rows,
            dataset.rows(("resid_post", 3), [], "last_prompt").rows,
        ):  # fmt: skip
            assert rows.shape == (0, D) and rows.dtype == kind
        assert (
            dataset["a"]["resid_post", 3].shape == (4, D) and dataset.count() == dataset.count(("resid_post", 3)) == 4
        )
        assert list(dataset.torch(("resid_post", 5), batch_size=2)) == []
        assert verify(dataset).rows == 4 and [s.rows for s in inspect(dataset).sites] == [4, 0]
    if compress not in (None, "full8"):
        assert load(tmp_path / "to").rows(("resid_post", 3), [], space="projected").rows.shape == (0, 32)
    with pytest.raises(WeirError, match="space"):
        load(tmp_path / "to").rows(("resid_post", 3), [], space="modle")


def test_no_requests_of_rows_of_several_dtypes(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        for name, dtype in (("a", torch.bfloat16), ("b", torch.float16)):
            writer.write(Batch(name, "resid_post", 3, [0], [0], torch.ones(1, D, dtype=dtype)))
            writer.finish_request(name)
    dataset = load(tmp_path)
    assert dataset.rows(("resid_post", 3), []).rows.dtype == dataset.rows(("resid_post", 3)).rows.dtype == torch.float32
    assert dataset.rows(("resid_post", 3), "b", positions=[7]).rows.dtype == torch.float16


def test_shards_roll_by_size_and_join_when_reopened(tmp_path: Path) -> None:
    names = [f"r{i}" for i in range(12)]
    with open_writer(tmp_path, shard_bytes=2000) as writer:
        for name in names[:6]:
            write(writer, name)
    assert len(list(tmp_path.glob("shard-*"))) >= 6
    with open_writer(tmp_path, shard_bytes=1 << 20) as writer:
        assert all(map(writer.holds, names[:6])) and not writer.holds(names[6])
        for name in names[6:]:
            write(writer, name)
    check(load(tmp_path), names)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_there_is_neither_repeated_nor_mixed(layout: str, tmp_path: Path) -> None:
    make(tmp_path, layout, ["a"])
    with open_writer(tmp_path, layout) as writer:
        assert writer.holds("a")
        with pytest.raises(WeirError, match="holds request 'a' already"):
            write(writer, "a")
        write(writer, "b", finish=False)
        with pytest.raises(WeirError, match="position 0 of resid_pre\\[0\\] of request 'b' was written before"):
            write(writer, "b")
        writer.finish_request("b", {"prompt_tokens": PROMPT, "text": "b"})
        writer.finish_request("empty")
    dataset = load(tmp_path)
    assert sorted(dataset.requests) == ["a", "b", "empty"]
    assert len(dataset["empty"]) == 0
    other = "packed" if layout != "packed" else "npz"
    with pytest.raises(WeirError, match=f"layout '{layout}'"):
        open_writer(tmp_path, other)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(WeirError, match="is not empty"):
        open_writer(tmp_path)
    with pytest.raises(WeirError, match="holds no activations"):
        load(tmp_path)
    with pytest.raises(WeirError, match="does not exist"):
        load(tmp_path / "nowhere")
    assert os.listdir(tmp_path) == ["thesis.txt"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"request_id": ""}, "batch.request_id"), ({"request_id": 3}, "batch.request_id"),
        ({"layer": -1}, "batch.layer"),
        ({"layer": True}, "batch.layer"), ({"hook": "nose"}, "batch.hook"), ({"positions": [0, 1]}, "batch.positions"),
        ({"positions": [0, 0, 1]}, "batch.positions"), ({"positions": [-1, 0, 1]}, "batch.positions"),
        ({"positions": [0.5, 1, 2]}, "batch.positions"), ({"token_ids": [1]}, "batch.token_ids"),
        ({"rows": torch.zeros(3)}, "batch.rows"), ({"rows": torch.zeros(3, 8, dtype=torch.int32)}, "batch.rows"),
        ({"rows": torch.zeros(3, 8, dtype=torch.uint8)}, "batch.rows"), ({"rows": torch.zeros(3, 2, 0)}, "compress"),
        ({"header": {}}, "batch.header.format"),
        ({"header": Compression().header(9, "float32")}, "batch.rows"),
    ],
)  # fmt: skip
def test_bad_batches_are_refused_with_their_field(change: dict, field: str, tmp_path: Path) -> None:
    fields = {"request_id": "a", "hook": "resid_post", "layer": 1, "positions": [0, 1, 2], "token_ids": [1, 2, 3],
              "rows": torch.zeros(3, 8)}  # fmt: skip
    with open_writer(tmp_path) as writer:
        with refused(field):
            writer.write(Batch(**(fields | change)))
        writer.write(Batch(**fields))  # a refused batch spoils nothing
        writer.finish_request("a")
        with pytest.raises(WeirError, match="metadata"):
            writer.finish_request("b", {"x": object()})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("begun_with", [0, 2])
def test_rows_of_a_site_come_in_one_kind_only(layout: str, begun_with: int, tmp_path: Path) -> None:
    """Some layouts took several, others refused to finish the request."""
    rows = rows_of("a", "resid_post", 3, 6)
    first, later = np.arange(begun_with), np.arange(begun_with, 6)
    rp8 = Compression.parse({"method": "rp8", "k": 32, "seed": 7})
    packed = encode(rows, rp8), rp8.header(D, "bfloat16")
    others: list[tuple[torch.Tensor, dict | None, str]] = [
        (rows.float(), None, "uncompressed, float32 rows of 48"),
        (rows[:, :2].contiguous(), None, "uncompressed, bfloat16 rows of 2"),
        (rows.view(6, 3, 16), None, "uncompressed, bfloat16 rows of 3 x 16"),
        (*packed, r"rp8 \(k 32, seed 7\), bfloat16 rows of 48"),
    ]
    with open_writer(tmp_path, layout) as writer:
        writer.write(Batch("a", "resid_post", 3, first, first, rows[: len(first)]))
        for other, header, words in others:
            told = rf"resid_post\[3\] of request 'a' were .* uncompressed, bfloat16 rows of 48, these are {words};"
            with pytest.raises(WeirError, match=told) as e:
                writer.write(Batch("a", "resid_post", 3, later, later, other[later], header))
            assert e.value.field == "batch.header" and "another id" in e.value.message
            writer.write(Batch(f"b{other.shape[1]}", "resid_post", 3, later, later, other[later], header))
            writer.write(Batch("a", "resid_pre", other.shape[1], later, later, other[later], header))
        writer.write(Batch("a", "resid_post", 3, later, later, rows[later]))
        writer.finish_request("a")
    assert load(tmp_path)["a"]["resid_post", 3].equal(rows) and len(load(tmp_path)["a"]) == 5


def test_bad_options_are_refused(tmp_path: Path) -> None:
    for arguments, field in [
        ({"layout": "tar"}, "layout"), ({"pack_bytes": 3}, "pack_bytes"), ({"shard_bytes": 0}, "shard_bytes"),
        ({"compress": "zip"}, "compress.method"), ({"layout": "npz", "buffer_bytes": "1e9"}, "buffer_bytes"),
    ]:  # fmt: skip
        with refused(field):
            open_writer(tmp_path, **arguments)
    with pytest.raises(WeirError, match="what://"):
        load("what://there")
    with open_writer(tmp_path, "per_request", buffer_bytes=100) as writer:
        with pytest.raises(WeirError, match="buffer_bytes"):
            write(writer, "a")
        assert "a" in writer.failed


def test_many_rows_are_indexed_and_one_request_read_in_few_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long it takes for a million of them `bench/keep.py` measures."""
    with open_writer(tmp_path) as writer:
        rows = torch.arange(100 * 4, dtype=torch.float32).view(100, 4)
        for i in range(200):
            writer.write(Batch(f"request-{i}", "resid_post", 0, np.arange(100), np.arange(100) % 97, rows + i))
            writer.finish_request(f"request-{i}")
    read: list[int] = []
    real = LocalFiles.cat_file
    monkeypatch.setattr(LocalFiles, "cat_file", lambda *a, **k: read.append(len(out := real(*a, **k))) or out)
    dataset = load(tmp_path)
    assert dataset.count() == 20_000 and len(read) < 10 and sum(read) < rows.nbytes * 200
    read.clear()
    assert torch.equal(dataset["request-123"]["resid_post", 0], rows + 123)
    assert len(read) <= 1 and sum(read) <= rows.nbytes


_READ = """
import sys
from pathlib import Path
from vllm_weir.extraction.readers import Parquet
from vllm_weir.storage import load
from vllm_weir.storage.object_store import ObjectStore
threads = lambda: len(list(Path("/proc/self/task").iterdir()))
before = threads()
assert len(load(sys.argv[1])) == 4
store = ObjectStore(sys.argv[2])
part = type("InputFile", (), {"name": "texts.parquet"})
assert list(Parquet().read(store, part, 0, 9, "text")) == [(1, "a"), (2, "b")]
assert threads() == before, (before, threads())
"""


def test_reading_leaves_no_thread_that_could_abort_the_process_at_its_end(tmp_path: Path) -> None:
    """An Arrow thread that lets go of Python's memory while the interpreter ends calls std::terminate."""
    make(tmp_path / "rows", "sharded", NAMES[:4])
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "texts.parquet")
    subprocess.run([sys.executable, "-c", _READ, str(tmp_path / "rows"), str(tmp_path)], check=True)


@pytest.mark.parametrize(
    ("url", "why"),
    [("", "it is empty; the current directory is '.'"), (None, "is text, got NoneType"), (7, "is text, got int"),
     (b"acts", "is text, got bytes"), ("a\0b", "cannot contain a NUL")],
)  # fmt: skip
def test_a_url_that_is_none_is_refused(url: Any, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one was the current directory."""
    make(tmp_path, "sharded", ["a"])
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    for call in (load, open_writer, analysis.load_activation_file, analysis.load_activation_manifest):
        with refused("url", f"^url: .*{why}"):
            call(url)
    assert sorted(tmp_path.iterdir()) == before
    check(load("."), ["a"])


@pytest.mark.parametrize("options", [[1], "x", 7, {1: 2}])
def test_storage_options_that_are_none_are_refused(options: Any, tmp_path: Path) -> None:
    for call in (load, open_writer):
        with refused("storage_options", r"^storage_options: expected a dict whose keys are names of options$"):
            call(tmp_path, storage_options=options)
