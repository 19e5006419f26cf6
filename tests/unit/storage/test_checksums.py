"""Checksums of rows: a bit that flips in a file is an error that names it, on every way from the file to the reader."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from tests.support.properties import examples
from tests.unit.stored import SITES, WORKERS, check, length_of, make, rows_of, write
from vllm_weir import analysis
from vllm_weir.cli.main import app
from vllm_weir.errors import WeirError
from vllm_weir.results.checksum import MULTIPLIER, checksums
from vllm_weir.results.safetensors_header import build_header
from vllm_weir.storage import ActivationDataset, Batch, convert, inspect, load, open_writer
from vllm_weir.storage.layouts import sharded
from vllm_weir.storage.layouts.manifest import SCHEMA, from_parquet, to_parquet
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.safetensors_io import read_container
from vllm_weir.storage.verify import verify

SUMMED = ("sharded", "packed", "per_request")
KINDS = (None, {"method": "rp8", "k": 32}, {"method": "topk8", "k": 16})
NAMES = ["a", "b", "c"]
SITE = SITES[2]


def plainly(record: bytes) -> int:
    """The checksum of one record, word by word."""
    total = sum(int.from_bytes(record[at : at + 8], "little") for at in range(0, len(record), 8))
    return total * MULTIPLIER % 2**64 >> 32


widths = st.one_of(st.integers(1, 100), st.integers(4090, 4110))


@given(widths, st.integers(0, 7), st.integers(0, 2**32), st.data())
def test_any_flipped_bit_is_seen_wherever_records_lie(width: int, shift: int, seed: int, data: st.DataObject) -> None:
    n, gap = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 9))
    memory = np.random.default_rng(seed).integers(0, 256, shift + n * (width + gap), np.uint8)
    records = memory[shift:].reshape(n, width + gap)[:, :width]
    expected = checksums(records)
    assert expected.dtype == np.uint32 and expected.tolist() == [plainly(record.tobytes()) for record in records]
    assert checksums(np.ascontiguousarray(records)).tolist() == expected.tolist()
    assert checksums(np.asfortranarray(records)).tolist() == expected.tolist()
    assert checksums(records[::-2]).tolist() == expected[::-2].tolist()
    if n:
        row, bit = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, 8 * width - 1))
        records[row, bit // 8] ^= 1 << bit % 8
        assert np.flatnonzero(checksums(records) != expected).tolist() == [row]


def test_every_bit_of_a_sum_reaches_the_half_that_is_kept() -> None:
    """A flipped bit adds or takes a power of two; times the multiplier that is more than the half that is dropped."""
    for bit in range(64):
        assert 2**32 <= (MULTIPLIER << bit) % 2**64 <= 2**64 - 2**32, bit


@given(st.integers(8, 2000), st.integers(0, 2**32))
@examples(50)
def test_overwritten_records_are_seen(width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    record, other = rng.integers(0, 256, (2, 1, width), np.uint8)
    assert checksums(other) != checksums(record) != checksums(np.zeros_like(record))


def flip(dataset: ActivationDataset, request: str, site: tuple[str, int], position: int, rng: random.Random) -> Path:
    """Flip one bit of a row in its file, which is returned."""
    index = dataset.index
    runs = np.flatnonzero(
        (index.run_request == index.request_codes[request]) & (index.run_site == index.sites.index(site))  # type: ignore[arg-type]
    )
    which, at = index.expand(runs)
    (row,) = np.flatnonzero(index.positions[at] == position)
    block = index.blocks[index.run_block[which[row]]]
    byte = int(index.offsets(which[row : row + 1], at[row : row + 1])[0]) + rng.randrange(block.width)
    with block.store.fs.open(block.store.path(block.name), "rb") as file:
        raw = bytearray(file.read())
    raw[byte] ^= 1 << rng.randrange(8)
    with block.store.fs.open(block.store.path(block.name), "wb") as file:
        file.write(raw)
    return Path(block.store.describe(block.name))


@pytest.mark.parametrize("layout", SUMMED)
@pytest.mark.parametrize("compress", KINDS)
@pytest.mark.parametrize("remote", [False, True])
def test_a_flipped_bit_is_an_error_that_names_the_file(
    layout: str, compress: object, remote: bool, tmp_path: Path
) -> None:
    url = f"memory://{uuid.uuid4()}/ds" if remote else str(tmp_path / "ds")
    rng = random.Random(str((layout, compress)))
    make(url, layout, NAMES, compress=compress)
    good = {name: load(url)[name][SITE] for name in NAMES}
    position = rng.randrange(length_of("b"))
    file = flip(load(url), "b", SITE, position, rng)
    dataset = load(url)
    wrong = rf"{file.name}: damaged: the row at byte \d+ \(position {position} of resid_post\[3\] of request 'b'\)"
    with pytest.raises(WeirError, match=rf"{wrong} does not match its checksum; restore the file from a copy"):
        dataset["b"][SITE]
    with pytest.raises(WeirError, match=wrong):
        dataset.rows(SITE)
    for name in ("a", "c"):
        assert torch.equal(dataset[name][SITE], good[name])
    others = [p for p in range(length_of("b")) if p != position]
    undamaged = dataset.rows(SITE, "b", others).rows
    if compress is None:
        assert torch.equal(undamaged, good["b"][others])
    else:  # decoded by a product, whose last bits may depend on how many rows it has
        torch.testing.assert_close(undamaged, good["b"][others], rtol=1e-5, atol=1e-6)
    assert len(dataset["b"][SITES[0]]) == length_of("b")


def without_checksums(path: Path, layout: str) -> None:
    """Make a dataset one of a version that knew no checksums."""
    store = ObjectStore(path)
    for file in path.glob("*.safetensors"):
        container, raw = read_container(store, file.name), file.read_bytes()
        tensors = {}
        for name, t in container.tensors.items():
            data = raw[t.start : t.end]
            if name == "manifest":
                data = to_parquet(from_parquet(store, file.name, data).drop_columns(["checksum"]))
            if not name.endswith(".checksums"):
                shape = [len(data)] if name == "manifest" else list(t.shape)
                tensors[name] = ((t.dtype, shape, len(data)), data)
        room = sharded.HEADER_SPACE if layout == "sharded" else 0
        for crc in ("lists", "manifest"):
            container.metadata.pop(crc, None)
        header = build_header({name: place for name, (place, _) in tensors.items()}, container.metadata, room)
        file.write_bytes(header + b"".join(data for _, data in tensors.values()))
    if layout == "sharded":
        manifest = path / "manifest.parquet"
        pq.write_table(pq.read_table(manifest).drop_columns(["checksum"]), manifest)


@pytest.mark.parametrize("layout", SUMMED)
def test_datasets_of_earlier_versions_are_read_and_continued(layout: str, tmp_path: Path) -> None:
    make(tmp_path, layout, NAMES[:2])
    without_checksums(tmp_path, layout)
    check(load(tmp_path), NAMES[:2], summed=False)
    found = verify(load(tmp_path))
    assert found.unsummed == found.rows == load(tmp_path).count() and not found.damaged
    flip(load(tmp_path), "a", SITE, 3, random.Random(1))
    assert not torch.equal(load(tmp_path)["a"][SITE], rows_of("a", *SITE, length_of("a")))
    with open_writer(tmp_path, layout) as writer:
        write(writer, "c")
    for _ in range(2):
        mixed = load(tmp_path)
        assert torch.equal(mixed["b"][SITE], rows_of("b", *SITE, length_of("b")))
        assert torch.equal(mixed["c"][SITE], rows_of("c", *SITE, length_of("c")))
        with open_writer(tmp_path, layout) as writer:
            writer.tidy()
    assert verify(mixed).unsummed == 3 * (length_of("a") + length_of("b"))
    flip(mixed, "c", SITE, 3, random.Random(2))
    with pytest.raises(WeirError, match=r"position 3 of .* of request 'c'"):
        load(tmp_path)["c"][SITE]


ONCE = (("packed", "workers"), ("per_request", "workers"))
"""What is left out, as a stream in a worker is read as one without."""
WAYS: dict[str, Callable[[ActivationDataset, Path], object]] = {
    "stream": lambda ds, out: list(ds.torch(SITE, batch_size=4)),
    "in order": lambda ds, out: list(ds.torch(SITE, shuffle=False)),
    "workers": lambda ds, out: list(
        DataLoader(ds.torch(SITE, batch_size=4), batch_size=None, num_workers=1, multiprocessing_context=WORKERS)
    ),
    "copy": lambda ds, out: convert(ds, out, "npz"),
    "compress": lambda ds, out: convert(ds, out, "sharded", compress="full8"),
    "inspect": lambda ds, out: inspect(ds),
    "request": lambda ds, out: dict(ds["b"]),
    "quick_load": lambda ds, out: analysis.quick_load(ds.url, "b", layer=SITE[1]),
    "loader": lambda ds, out: analysis.ActivationLoader(ds.url).load_request("b"),
}


@pytest.mark.parametrize(
    ("layout", "way"), [(layout, way) for layout in SUMMED for way in WAYS if (layout, way) not in ONCE]
)
def test_every_way_of_reading_compares_checksums(layout: str, way: str, tmp_path: Path) -> None:
    make(tmp_path / "ds", layout, NAMES)
    file = flip(load(tmp_path / "ds"), "b", SITE, 2, random.Random(3))
    with pytest.raises(WeirError, match=f"{file.name}: damaged: the row at byte .* does not match its checksum"):
        WAYS[way](load(tmp_path / "ds"), tmp_path / "out")
    if (tmp_path / "out" / "weir.json").exists():  # nothing damaged was copied
        assert "b" not in load(tmp_path / "out")


def test_rows_that_are_given_up_or_tried_again_leave_the_others_their_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small batches and large ones, with requests abandoned between them and a write that is interrupted."""
    monkeypatch.setattr(sharded, "GATHER_BYTES", 2000)
    writer = open_writer(tmp_path, "sharded")
    large = rows_of("x", *SITE, 40)
    for name in NAMES:
        write(writer, name, finish=False, pieces=1)
        write(writer, f"not {name}", finish=False)
        writer.write(Batch(f"not {name}", "resid_mid", 3, np.arange(40), np.arange(40), large))
        writer.abandon(f"not {name}")
        writer.finish_request(name, {"prompt_tokens": 5, "text": name})
    for error in (KeyboardInterrupt, MemoryError):
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(sharded, "checksums", lambda _, error=error: (_ for _ in ()).throw(error))
            writer.write(Batch("x", *SITE, np.arange(40), np.arange(40), large))
    writer.write(Batch("x", *SITE, np.arange(40), np.arange(40), large))
    writer.finish_request("x")
    write(writer, "d")
    writer.close()
    dataset = load(tmp_path)
    assert torch.equal(dataset["x"][SITE], large) and dataset.index.run_has_checksums.all()
    assert sorted(dataset) == [*NAMES, "d", "x"]
    for name in (*NAMES, "d"):
        for site in SITES:
            assert torch.equal(dataset[name][site], rows_of(name, *site, length_of(name)))


@pytest.mark.parametrize("layout", SUMMED)
def test_verify(layout: str, tmp_path: Path) -> None:
    make(tmp_path, layout, NAMES, compress="full8", **({"shard_bytes": 1000} if layout == "sharded" else {}))
    run = CliRunner()
    rows = load(tmp_path).count()
    done = run.invoke(app, ["inspect", str(tmp_path), "--verify"])
    assert done.exit_code == 0 and f"{rows} rows read, {rows} have checksums, 0 are damaged" in done.output, done.output
    file = flip(load(tmp_path), "b", SITE, 0, random.Random(5))
    flip(load(tmp_path), "b", SITE, 1, random.Random(6))
    done = run.invoke(app, ["inspect", str(tmp_path), "--verify", "--json"])
    assert done.exit_code == 1 and f"Error: {file}: damaged: the row at byte" in done.stderr, done.output
    found = json.loads(done.stdout)["verified"]
    assert (found["rows"], found["unsummed"]) == (rows, 0)
    assert [(one["file"], one["rows"]) for one in found["damaged"]] == [(str(file), 2)]
    done = run.invoke(app, ["inspect", str(tmp_path), "--verify"])
    assert done.exit_code == 1 and f"{rows} rows read, {rows} have checksums, 2 are damaged" in done.output


def test_verify_sees_what_zip_sees(tmp_path: Path) -> None:
    rows = torch.randn(400, 64, generator=torch.Generator().manual_seed(0))
    with open_writer(tmp_path, "npz", compress="full8") as writer:
        for layer in (0, 1):
            writer.write(Batch("a", "resid_post", layer, np.arange(400), np.arange(400), rows))
        writer.finish_request("a")
    assert verify(load(tmp_path)).to_dict() == {"rows": 800, "unsummed": 0, "damaged": []}
    file = tmp_path / "req_a" / "seq0_layer1_rank0.npz"
    raw = bytearray(file.read_bytes())
    raw[raw.index(b"q.npy") + 9000] ^= 1
    file.write_bytes(raw)
    (one,) = verify(load(tmp_path)).damaged
    assert (one.file, one.rows) == (str(file), 400) and "Bad CRC-32" in one.error


def test_the_checksums_are_those_of_the_format(tmp_path: Path) -> None:
    """As another program reads them: from the manifest, and from the tensors."""
    make(tmp_path / "s", "sharded", ["a"])
    assert SCHEMA.names == pq.read_schema(tmp_path / "s" / "manifest.parquet").names
    for run in pq.read_table(tmp_path / "s" / "manifest.parquet").to_pylist():
        assert len(run["checksum"]) == (0 if run["finished"] else run["rows"])
        if not run["finished"]:
            raw = (tmp_path / "s" / run["file"]).read_bytes()[run["offset"] :]
            records = [raw[i * run["stride"] : (i + 1) * run["stride"]] for i in range(run["rows"])]
            assert run["checksum"] == [plainly(record) for record in records]
    make(tmp_path / "p", "per_request", ["a"])
    tensors = load_file(tmp_path / "p" / "a.safetensors")
    assert tensors["resid_post.3.checksums"].dtype == torch.uint32
    rows = rows_of("a", *SITE, length_of("a"))
    assert tensors["resid_post.3.checksums"].tolist() == [plainly(r.view(torch.uint8).numpy().tobytes()) for r in rows]


def test_rows_with_checksums_are_compared_beside_rows_without(tmp_path: Path) -> None:
    make(tmp_path, "per_request", NAMES[:1])
    index = load(tmp_path).index
    runs, rows = index.expand(np.arange(len(index.run_rows)))
    records = np.concatenate([found for _, found in index.gather(runs, rows).values()])
    index.run_has_checksums[0] = False
    kept = runs > 0
    assert len(index.mismatches(runs, rows, records)) == 0
    index.checksums[rows] ^= 1
    assert index.mismatches(runs, rows, records).tolist() == np.flatnonzero(kept).tolist()
