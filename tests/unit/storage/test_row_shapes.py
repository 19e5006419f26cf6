"""Datasets whose sites have rows of different shapes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors import safe_open

from tests.unit.stored import PROMPT, SHAPES, make, shaped_rows, tokens_of
from vllm_weir import Activations, Site, WeirError
from vllm_weir.analysis import ActivationLoader
from vllm_weir.consumers import EngineInfo, Finished, Rows
from vllm_weir.consumers.filesystem import Filesystem
from vllm_weir.consumers.norms import Norms
from vllm_weir.storage import LAYOUTS, Batch, convert, load, open_writer
from vllm_weir.storage.stats import inspect, show
from vllm_weir.storage.verify import verify

N = 9


def write_shaped(path: Path, layout: str, names: tuple[str, ...] = ("a", "b"), **options) -> None:
    rows = shaped_rows(N)
    with open_writer(path, layout, **options) as writer:
        for name in names:
            for part in (np.arange(4), np.arange(4, N)):
                for (hook, layer), r in rows.items():
                    writer.write(Batch(name, hook, layer, part, tokens_of(N)[part], r[torch.from_numpy(part)]))
            writer.finish_request(name, {"prompt_tokens": PROMPT})


def assert_holds(dataset, names: tuple[str, ...] = ("a", "b")) -> None:
    assert sorted(dataset.requests) == sorted(names)
    assert [tuple(s) for s in dataset.sites] == ORDERED
    rows = shaped_rows(N)
    for name in names:
        for site, expected in rows.items():
            got = dataset[name][site]
            assert got.dtype == expected.dtype and torch.equal(got, expected), site
    for site, expected in rows.items():
        twice = [len(names)] + [1] * (expected.ndim - 1)
        assert torch.equal(dataset.rows(site, positions=[2, 5]).rows, expected[[2, 5]].repeat(twice)), site
        assert dataset.rows(site, []).rows.shape == (0, *SHAPES[site])
        (batch,) = dataset.torch(site, shuffle=False, batch_size=2 * N)
        assert torch.equal(batch, expected.repeat(twice)) and batch.dtype == expected.dtype


ORDERED = sorted(SHAPES, key=lambda site: ["q", "k", "router_logits", "expert_ids", "expert_weights", "mlp_post",
                                           "resid_post"].index(site[0]))  # fmt: skip
"""The sites in the order in which a token meets them."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_come_back_in_their_shapes(layout: str, tmp_path: Path) -> None:
    write_shaped(tmp_path, layout)
    dataset = load(tmp_path)
    assert_holds(dataset)
    verified = verify(dataset)
    assert verified.rows == 2 * N * len(SHAPES) and not verified.damaged and not verified.unsummed
    shapes = {tuple(h.get("shape", [h["d_model"]])) for h in dataset.headers}
    assert shapes == set(SHAPES.values())


@pytest.mark.parametrize(("source", "target"), zip(LAYOUTS, [*LAYOUTS[1:], LAYOUTS[0]], strict=True))
def test_conversions_keep_shapes(source: str, target: str, tmp_path: Path) -> None:
    write_shaped(tmp_path / "source", source)
    assert convert(tmp_path / "source", tmp_path / "target", target) == 2
    assert_holds(load(tmp_path / "target"))
    assert convert(tmp_path / "source", tmp_path / "target", target) == 0  # they are there


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compressed_rows_of_heads(layout: str, tmp_path: Path) -> None:
    """Compressed when they are written, or later: values within half a step, integers as they are."""
    write_shaped(tmp_path / "plain", layout)
    write_shaped(tmp_path / "small", layout, compress="full8")
    assert convert(tmp_path / "plain", tmp_path / "later", layout, compress="full8") == 2
    assert convert(tmp_path / "plain", tmp_path / "later", layout, compress="full8") == 0
    for name in ("small", "later"):
        dataset = load(tmp_path / name)
        for site, expected in shaped_rows(N).items():
            got = dataset["a"][site]
            assert got.shape == expected.shape
            if site[0] == "expert_ids":
                assert torch.equal(got, expected)
                continue
            flat = expected.float().flatten(1)
            bound = (flat.amax(1, True) - flat.amin(1, True)) / 255 / 2 * 1.001
            assert ((got.flatten(1) - flat).abs() <= bound).all()
            assert expected[0].numel() == 2 or not torch.equal(got, expected.float())  # two values are exact


def test_tensors_of_files_have_the_shapes(tmp_path: Path) -> None:
    """So that a file of a request is one of `Activations.save`, and a shard can be read by anybody."""
    write_shaped(tmp_path / "one", "per_request", ("a",))
    acts = Activations.load(tmp_path / "one" / "a.safetensors")
    assert {tuple(site): tuple(acts[site].shape[1:]) for site in acts.sites} == SHAPES
    write_shaped(tmp_path / "shards", "sharded")
    shapes = set()
    for name in os.listdir(tmp_path / "shards"):
        if name.startswith("shard-"):
            with safe_open(tmp_path / "shards" / name, "pt") as file:
                shapes.add(tuple(file.get_slice("rows").get_shape()[1:]))
    assert shapes == set(SHAPES.values())


def test_saved_activations_are_a_dataset(tmp_path: Path) -> None:
    rows = shaped_rows(N) | {("pattern", 1): torch.rand(N, 6, N)}
    at = dict.fromkeys((Site(*site) for site in rows), torch.arange(N))
    Activations({Site(*site): r for site, r in rows.items()}, at, at).save(tmp_path / "x.safetensors")
    empty = {Site("pattern", 1): torch.zeros(0, 6, 0), Site("q", 1): torch.zeros(0, 6, 32)}
    nowhere = dict.fromkeys(empty, torch.zeros(0, dtype=torch.int64))
    Activations(empty, nowhere, nowhere).save(tmp_path / "none.safetensors")
    dataset = load(tmp_path)
    for site, expected in rows.items():
        assert torch.equal(dataset["x"][site], expected)
        assert torch.equal(load(tmp_path / "x.safetensors")["x"][site], expected)
    assert [tuple(s) for s in dataset["none"].sites] == [("q", 1)] and dataset["none"]["q", 1].shape == (0, 6, 32)


def test_one_site_in_several_shapes(tmp_path: Path) -> None:
    """Picked heads of one request and all of another, say: each by itself, and no mix of them."""
    with open_writer(tmp_path, "sharded") as writer:
        for name, shape in (("a", (2, 8)), ("b", (16,)), ("c", (4, 8))):
            writer.write(Batch(name, "z", 0, [0, 1], [5, 6], torch.ones(2, *shape)))
            writer.finish_request(name)
    dataset = load(tmp_path)
    assert [tuple(acts["z", 0].shape) for acts in dataset.values()] == [(2, 2, 8), (2, 16), (2, 4, 8)]
    wanted = r"rows of z\[0\] differ in width between requests: 2 x 8 \('a'\), 4 x 8 \('c'\), 16 \('b'\)"
    for read in (lambda: dataset.rows(("z", 0)), lambda: dataset.torch(("z", 0))):
        with pytest.raises(WeirError, match=wanted):
            read()
    assert [s.sampled for s in inspect(dataset).sites] == [0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_statistics(layout: str, tmp_path: Path) -> None:
    write_shaped(tmp_path, layout)
    found = inspect(load(tmp_path), sample=1000)
    rows = shaped_rows(N)
    assert {(s.hook, s.layer): tuple(s.shape) for s in found.sites} == SHAPES
    assert found.stored_bytes == found.raw_bytes == 2 * sum(r.nbytes for r in rows.values())
    for s in found.sites:
        flat = rows[s.hook, s.layer].double().flatten(1)
        assert s.d_model == flat.shape[1] and s.bad == 0 and s.sampled == 2 * N
        assert s.norm == pytest.approx(flat.norm(dim=1).mean().item(), rel=1e-9)
        assert s.mean == pytest.approx(flat.mean().item(), rel=1e-9, abs=1e-9 * flat.abs().mean().item())
    assert json.loads(json.dumps(found.to_dict()))["sites"][0]["shape"] == [6, 32]
    with (tmp_path / "table.txt").open("w") as file:
        show(found, Console(width=200, file=file))
    (line,) = (line for line in (tmp_path / "table.txt").read_text().splitlines() if line.startswith("k[1]"))
    assert " 2 x 32 " in line


def test_a_damaged_row_of_heads_is_found(tmp_path: Path) -> None:
    write_shaped(tmp_path, "per_request", ("a",))
    path = tmp_path / "a.safetensors"
    needle = shaped_rows(N)["q", 1][3].contiguous().view(torch.uint8).numpy().tobytes()
    data = path.read_bytes()
    at = data.index(needle) + 100
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(WeirError, match=r"position 3 of q\[1\]"):
        load(tmp_path)["a"]["q", 1]
    with pytest.raises(WeirError, match=r"a\.safetensors is damaged: rows of q\[1\] do not match their checksums"):
        Activations.load(path)


def test_headers_of_rows_that_are_one_vector_are_what_they_were(tmp_path: Path) -> None:
    make(tmp_path, "per_request", ["a"])
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        headers = json.loads(file.metadata()["headers"])
    keys = {"format", "version", "method", "k", "seed", "axis", "d_model", "dtype", "fields"}
    assert [set(header) for header in headers] == [keys] * 3


def finished(name: str = "r") -> Finished:
    return Finished(name, 0, name, 3, 2, "length")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_consumer_of_files(layout: str, tmp_path: Path) -> None:
    consumer = Filesystem(str(tmp_path), layout)
    consumer.open(EngineInfo("m", 2, 48, "bfloat16"))
    for name in ("a", "b"):
        for site, r in shaped_rows(N).items():
            consumer.take(Rows(finished(name), Site(*site), torch.arange(N), torch.from_numpy(tokens_of(N)), r))
        consumer.finish(finished(name))
    consumer.close()
    assert_holds(load(tmp_path))


def test_the_consumer_of_norms() -> None:
    consumer = Norms(seconds=1e9)
    for site, r in shaped_rows(N).items():
        consumer.take(Rows(finished(), Site(*site), torch.arange(N), torch.arange(N), r))
    expected = shaped_rows(N)["q", 1].double().flatten(1).norm(dim=1)
    running = consumer.sites[Site("q", 1)]
    assert running.rows == N and running.mean == pytest.approx(expected.mean().item(), rel=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loader_of_vllm_mi_patch(layout: str, tmp_path: Path) -> None:
    write_shaped(tmp_path, layout, ("a",))
    rows = shaped_rows(N)
    for hook in ("q", "mlp_post", "expert_ids"):
        (layers,) = ActivationLoader(tmp_path, hook=hook).load_request("a", reconstruct=True).values()
        expected = rows[hook, 1] if hook == "expert_ids" else rows[hook, 1].float()
        assert np.array_equal(layers[1], expected.numpy()), hook
