"""Damaged files of every layout: the right rows, or a WeirError; and nothing that `verify` passes is wrong."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import settings

from tests.unit.storage.test_checksums import without_checksums
from tests.unit.stored import SITES, check, make
from vllm_weir.errors import WeirError
from vllm_weir.results.safetensors_header import build_header
from vllm_weir.storage import LAYOUTS, load, open_writer
from vllm_weir.storage.layouts.manifest import MANIFEST, SCHEMA, to_parquet
from vllm_weir.storage.layouts.sharded import HEADER_SPACE
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.storage.safetensors_io import read_container
from vllm_weir.storage.verify import verify

NAMES = ["a", "b", "c"]


def replace_manifest(file: Path, change: Any) -> None:
    """Change a shard's own manifest; as in shards of earlier versions there is no checksum of it."""
    container, raw = read_container(ObjectStore(file.parent), file.name), file.read_bytes()
    places = container.tensors
    manifest = change(raw[places["manifest"].start : places["manifest"].end])
    tensors = {name: (t.dtype, list(t.shape), t.end - t.start) for name, t in places.items()}
    tensors["manifest"] = ("U8", [len(manifest)], len(manifest))
    container.metadata.pop("manifest", None)
    header = build_header(tensors, container.metadata, HEADER_SPACE)
    file.write_bytes(header + raw[HEADER_SPACE : places["manifest"].start] + manifest)


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
    make(path, "sharded", NAMES, shard_bytes=2500)
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
    place = read_container(ObjectStore(path), shards[1].name).tensors["manifest"]
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


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """With a byte flipped or a few overwritten, or cut off."""
    at = rng.randrange(len(raw))
    kind = rng.randrange(4)
    if kind == 0:
        return raw[:at]
    some = rng.randbytes(8)[: len(raw) - at] if kind == 1 else bytes([raw[at] ^ rng.randrange(1, 256)])
    return raw[:at] + some + raw[at + len(some) :]


Content = dict[str, tuple[dict[str, Any], dict[Any, tuple[torch.Tensor, ...]]]]


def content(path: Path) -> Content:
    """All that a dataset holds, read now."""
    dataset = load(path)
    return {
        name: (
            dataset.metadata(name),
            {site: (acts[site], acts.positions_of(*site), acts.token_ids_of(*site)) for site in acts},
        )
        for name, acts in dataset.items()
    }


def same(found: Content, wanted: Content) -> bool:
    return list(found) == list(wanted) and all(
        found[name][0] == metadata
        and list(found[name][1]) == list(sites)
        and all(all(map(torch.equal, found[name][1][site], tensors)) for site, tensors in sites.items())
        for name, (metadata, sites) in wanted.items()
    )


def in_rows(raw: bytes, bad: bytes, layout: str) -> bool:
    """Whether what differs is among the rows of a file that has checksums of them."""
    header = int.from_bytes(raw[:8], "little")
    if layout == "npz" or raw[8:9] != b"{":
        return False
    places = json.loads(raw[8 : 8 + header])
    end = min([len(raw), *(t["data_offsets"][0] + 8 + header for n, t in places.items() if n in ("manifest", "lists"))])
    differs = np.flatnonzero(np.frombuffer(raw, np.uint8) != np.frombuffer(bad, np.uint8))
    return bool(len(differs)) and 8 + header <= differs[0] and differs[-1] < end


def plainly(manifest: bytes) -> bytes:
    """Without compression and page checksums: damage reaches what reads the values."""
    out = io.BytesIO()
    pq.write_table(pq.read_table(io.BytesIO(manifest)), out, compression="none", use_dictionary=["file", "request"])
    return out.getvalue()


@pytest.mark.parametrize("kind", [*LAYOUTS, "sharded, not joined", "sharded, plain", "sharded, of an earlier version"])
def test_damage_anywhere_is_an_error_or_harmless(kind: str, tmp_path: Path) -> None:
    """What `verify` passes is right, and a file that was cut off or whose rows were damaged is named."""
    layout = kind.partition(",")[0]
    path = tmp_path / "ds"
    make(path, layout, NAMES, compress={"method": "topk8", "k": 8}, **({"shard_bytes": 1500} if "," in kind else {}))
    joined = path / "manifest.parquet"
    if kind == "sharded, not joined":
        joined.unlink()
    if kind == "sharded, plain":
        joined.write_bytes(plainly(joined.read_bytes()))
    if kind == "sharded, of an earlier version":
        for shard in path.glob("shard-*"):
            replace_manifest(shard, plainly)
    good = content(path)
    files = sorted(p for p in path.rglob("*") if p.is_file())
    rng = random.Random(kind)
    noticed, times = 0, min(160, 2 * settings().max_examples)
    for i in range(times):
        # Half of it where most is parsed.
        file = joined if i % 2 and joined in files else rng.choice(files)
        raw = file.read_bytes()
        bad = damaged(raw, rng)
        file.write_bytes(bad)
        try:
            found = [one.file for one in verify(load(path)).damaged]
            whole = bool(found) or same(content(path), good)
        except WeirError as e:
            found = [str(e)]
        else:
            assert whole, file
        assert all(str(path) in one for one in found)
        if len(bad) < len(raw) or in_rows(raw, bad, layout):
            assert all(file.name in one for one in found) and (found or len(bad) < len(raw)), (file, found)
        noticed += bool(found)
        file.write_bytes(raw)
    assert same(content(path), good) and not verify(load(path)).damaged
    assert noticed > times / 2


def test_a_text_that_is_none_is_damage_of_the_manifest(tmp_path: Path) -> None:
    make(tmp_path, "sharded", NAMES, shard_bytes=1500)
    manifest = tmp_path / "manifest.parquet"
    raw = plainly(manifest.read_bytes())
    shard = next(tmp_path.glob("shard-*")).name.encode()
    assert shard in raw
    manifest.write_bytes(raw.replace(shard, b"\xff" + shard[1:]))
    with pytest.raises(WeirError, match=f"^{manifest}: its manifest cannot be read: "):
        load(tmp_path)


def test_a_place_outside_its_dictionary_is_damage_of_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "sharded", NAMES)
    table = pq.read_table(tmp_path / "manifest.parquet")
    places = pa.array([9] * len(table), pa.int32())
    outside = pa.DictionaryArray.from_arrays(places, pa.array(["x"]), safe=False)
    table = with_column(table, "file", outside)
    monkeypatch.setattr(pq.ParquetFile, "read", lambda self, **_: table)
    with pytest.raises(WeirError, match=rf"^{tmp_path}/manifest\.parquet: its manifest cannot be read: "):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("rows", lambda runs: [1 << 62] * len(runs), "its counts do not match its positions"),
        ("rows", lambda runs: [None] * len(runs), "column rows has missing values"),
        ("request", lambda runs: [None, *runs[1:]], "column request has missing values"),
        ("position", lambda runs: [[None] * len(run) for run in runs], "column position has missing values"),
        (
            "position",
            lambda runs: [[1] * sum(map(len, runs)), *([] for _ in runs[1:])],
            "its counts do not match its positions",
        ),
        (
            "checksum",
            lambda runs: [[1] * sum(map(len, runs)), *([] for _ in runs[1:])],
            "its counts do not match its checksums",
        ),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_manifest_of_wrong_counts_is_damage(name: str, values: Any, why: str, tmp_path: Path) -> None:
    make(tmp_path, "sharded", NAMES)
    manifest = tmp_path / "manifest.parquet"
    table = pq.read_table(manifest)
    column = pa.array(values(table[name].to_pylist()), SCHEMA.field(name).type)
    manifest.write_bytes(to_parquet(with_column(table, name, column)))
    with pytest.raises(WeirError, match=rf"^{manifest}: .*{why}"):
        load(tmp_path)


def test_the_manifest_names_each_site(tmp_path: Path) -> None:
    """What to filter by: `hook` and `layer` had to be put together."""
    make(tmp_path, "sharded", NAMES[:1])
    (mark, *runs) = sorted(pq.read_table(tmp_path / MANIFEST).to_pylist(), key=lambda row: not row["finished"])
    assert mark["site"] is None and mark["finished"]
    assert [run["site"] for run in runs] == [f"{run['hook']}.{run['layer']}" for run in runs]
    assert {run["site"] for run in runs} == {f"{hook}.{layer}" for hook, layer in SITES}


def test_manifests_without_sites_are_read_and_joined(tmp_path: Path) -> None:
    """Of an earlier version: in the shards, in the joined one, or in the joined one alone (it was at work last)."""

    def earlier(data: bytes) -> bytes:
        return to_parquet(pq.read_table(io.BytesIO(data)).drop_columns(["site"]))

    make(tmp_path, "sharded", NAMES, shard_bytes=1500)
    whole, joined = pq.read_table(tmp_path / MANIFEST).to_pylist(), tmp_path / MANIFEST
    joined.write_bytes(earlier(joined.read_bytes()))
    assert not verify(load(tmp_path)).damaged
    for shard in tmp_path.glob("shard-*"):
        replace_manifest(shard, earlier)
    assert not verify(load(tmp_path)).damaged
    joined.unlink()
    check(load(tmp_path), NAMES)
    with open_writer(tmp_path) as writer:
        writer.tidy()
    assert pq.read_table(joined).to_pylist() == whole
    assert not verify(load(tmp_path)).damaged
