"""Damaged files of every layout: the right rows, or a WeirError; and nothing that `verify` passes is wrong."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.stored import check, make
from tests.unit.test_keep_checksums import without_checksums
from vllm_weir.keep import load, open_writer
from vllm_weir.keep.atomic import Store
from vllm_weir.keep.manifest import SCHEMA, to_parquet
from vllm_weir.keep.tensorfile import build_header, read_container
from vllm_weir.keep.verify import verify

NAMES = ["a", "b", "c"]


def replace_manifest(file: Path, change: Any) -> None:
    """Change a shard's own manifest; as in shards of earlier versions there is no checksum of it."""
    container, raw = read_container(Store(file.parent), file.name), file.read_bytes()
    places = container.tensors
    manifest = change(raw[places["manifest"].start : places["manifest"].end])
    rows = raw[places["rows"].start : places["rows"].end]
    tensors = {"rows": (places["rows"].dtype, list(places["rows"].shape), len(rows))}
    tensors["manifest"] = ("U8", [len(manifest)], len(manifest))
    container.metadata.pop("manifest", None)
    file.write_bytes(build_header(tensors, container.metadata, places["rows"].start) + rows + manifest)


def with_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, values)


def shifted(data: bytes) -> bytes:
    """The manifest with other positions."""
    table = pq.read_table(io.BytesIO(data))
    positions = [[p + 1 for p in run] for run in table["position"].to_pylist()]
    return to_parquet(with_column(table, "position", pa.array(positions, SCHEMA.field("position").type)))


@pytest.mark.parametrize("remote", [False, True])
def test_verify_reads_the_manifest_in_each_shard(remote: bool, tmp_path: Path) -> None:
    """`load` takes the joined one, and sees no shard's own."""
    path = tmp_path / "ds"
    make(path, "sharded", NAMES, shard_bytes=1500)
    shards = sorted(path.glob("shard-*"))
    assert len(shards) > 2

    def damaged() -> list[tuple[str, str]]:
        url = str(path)
        if remote:
            url = f"memory://{tmp_path.name}/ds"
            fsspec.filesystem("memory").put(str(path), url, recursive=True)
        dataset = load(url)
        check(dataset, NAMES)
        found = [(Path(one.file).name, one.error) for one in verify(dataset).damaged]
        if remote:
            fsspec.filesystem("memory").rm(url, recursive=True)
        return found

    assert not damaged()
    raw = shards[1].read_bytes()
    place = read_container(Store(path), shards[1].name).tensors["manifest"]
    for at in (place.start, place.start + 30, (place.start + place.end) // 2, place.end - 1):
        shards[1].write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        ((name, error),) = damaged()
        assert name == shards[1].name and "its manifest is not what was written" in error
    shards[1].write_bytes(raw)
    replace_manifest(shards[1], lambda data: data)
    assert not damaged(), "what earlier versions wrote is compared, too"
    replace_manifest(shards[1], shifted)
    ((name, error),) = damaged()
    assert name == shards[1].name and "its own manifest and manifest.parquet differ" in error


def test_a_joined_manifest_that_is_another_s_is_found(tmp_path: Path) -> None:
    make(tmp_path, "sharded", NAMES, shard_bytes=1500)
    manifest = tmp_path / "manifest.parquet"
    manifest.write_bytes(shifted(manifest.read_bytes()))
    found = verify(load(tmp_path)).damaged
    assert found and all("its own manifest and manifest.parquet differ" in one.error for one in found)


def test_old_and_new_shards_agree_with_their_joined_manifest(tmp_path: Path) -> None:
    make(tmp_path, "sharded", NAMES[:2])
    without_checksums(tmp_path, "sharded")
    assert not verify(load(tmp_path)).damaged
    for name in ("c", "d"):
        make(tmp_path, "sharded", [name])
        with open_writer(tmp_path) as writer:
            writer.tidy()
        assert not verify(load(tmp_path)).damaged
