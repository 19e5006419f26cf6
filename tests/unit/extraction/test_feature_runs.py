"""Runs that extract features: their Parquet, what is refused, and going on; the engine is a made-up one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from tests.support.extracting import FakeFeatureEngine, fake_features, run_fake, same_features, texts, write_jsonl
from tests.unit.extraction.test_run import never
from tests.unit.refusals import refused
from vllm_weir.cli.main import app
from vllm_weir.errors import WeirError
from vllm_weir.extraction.feature_writer import FeatureBatch, FeatureWriter
from vllm_weir.extraction.run import extract
from vllm_weir.extraction.run_spec import FeatureSpec, request_id
from vllm_weir.extraction.source import open_source
from vllm_weir.sae.autoencoder import SAE
from vllm_weir.storage import load
from vllm_weir.storage.features.dataset import load_features
from vllm_weir.storage.features.parts import RecordFeatures, part_names
from vllm_weir.storage.object_store import ObjectStore
from vllm_weir.util.shipped import demo_sae

VALUES = texts(50)
MOOD = {"mood": demo_sae()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "t.jsonl", VALUES)


def run(source: Path, out: Path, **more: Any) -> Any:
    return run_fake(source, str(out), **{"sae": MOOD, "start_engine": FakeFeatureEngine} | more)


def expected(record: int) -> Any:
    return fake_features(FakeFeatureEngine._encode(None, VALUES[record]), record)  # type: ignore[arg-type]


def test_the_files_are_plain_parquet(source: Path, tmp_path: Path) -> None:
    summary = run(source, tmp_path / "out")
    table = pa.concat_tables(pq.read_table(path) for path in sorted((tmp_path / "out").glob("*.parquet")))
    assert {f.name: str(f.type) for f in table.schema} | {"features": "", "values": ""} == {
        "record": "int64", "position": "int32", "token_id": "int32", "generated": "bool", "features": "", "values": "",
    }  # fmt: skip
    assert table.schema.field("features").type.value_type == pa.int32()
    assert table.schema.field("values").type.value_type == pa.float32()
    rows = sum(len(value.split()) for value in VALUES)
    assert (len(table), summary.rows, summary.tokens) == (rows, rows, rows)
    # With pandas: a row for each token, and with explode one for each active feature.
    frame = table.to_pandas().sort_values(["record", "position"])
    assert len(frame[["record", "position"]].drop_duplicates()) == rows
    long = frame.explode(["features", "values"]).dropna(subset=["features"])
    wanted = [(r, at, f, v) for r in range(50) for at in range(len(expected(r))) for f, v in zip(*expected(r).row(at))]
    assert list(zip(long["record"], long["position"], long["features"], long["values"])) == wanted
    assert summary.bytes == 8 * len(wanted)


def test_features_by_record(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", batch=7, shard_bytes=1500)
    assert len(list((tmp_path / "out").glob("*.parquet"))) > 5
    ds = load_features(tmp_path / "out")
    assert ds.records.tolist() == list(range(50)) and len(ds) == 50 and 49 in ds and 50 not in ds and "x" not in ds
    assert ds.rows == sum(len(value.split()) for value in VALUES)
    for record in (49, 0, 17):
        assert same_features(ds[record], expected(record))
    assert sorted(one.record for one in ds) == list(range(50))
    one = ds[3]
    dense = one.dense(ds.info.d_sae)
    assert dense.shape == (len(one), 512) and dense.dtype == np.float32
    for at in range(len(one)):
        ids, values = one.row(at)
        assert np.array_equal(dense[at, ids], values) and np.count_nonzero(dense[at]) == len(ids)
    feature = int(one.ids[0])
    assert np.array_equal(one.of(feature), dense[:, feature])
    with pytest.raises(WeirError, match=r"^record: .*no record 50"):
        ds[50]


def test_what_is_written_beside_them(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", ids=[5, 3], limit=2)
    info = load_features(tmp_path / "out").info
    assert (info.sae, tuple(info.site), info.d_sae, info.model) == ("mood", ("resid_post", 3), 512, "fake")
    assert (info.top_k, info.ids, info.cfg["architecture"]) == (None, (5, 3), "jumprelu")
    run(source, tmp_path / "other", limit=2)
    assert (load_features(tmp_path / "other").info.top_k, load_features(tmp_path / "other").info.ids) == (32, None)


def test_a_run_goes_on(source: Path, tmp_path: Path) -> None:
    first = run(source, tmp_path / "out", limit=11)
    rest = run(source, tmp_path / "out", batch=7)
    assert (first.requests, rest.requests, rest.held) == (11, 39, 11)
    assert run(source, tmp_path / "out", start_engine=never).held == 50
    ds = load_features(tmp_path / "out")
    assert all(same_features(ds[record], expected(record)) for record in range(50))


def other_sae(tmp_path: Path) -> str:
    sae = SAE.load(demo_sae())
    weights = dict(sae.tensors)
    weights["b_enc"] = weights["b_enc"] + torch.ones(1, dtype=sae.dtype)
    SAE(sae.config, weights).save(tmp_path / "sae")
    return str(tmp_path / "sae")


def test_another_run_into_the_same_place_is_refused(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", limit=9)
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    for field, change in {
        "sae": {"sae": {"other": demo_sae()}}, "top_k": {"top_k": 5}, "ids": {"ids": [1], "top_k": None},
        "positions": {"positions": "last_prompt"},
    }.items():  # fmt: skip
        with pytest.raises(WeirError, match=f"^({field}|top_k): .*was begun with"):
            run(source, tmp_path / "out", **change)
    with pytest.raises(WeirError, match=r"^sae: .*was begun with"):
        run(source, tmp_path / "out", sae={"mood": other_sae(tmp_path)})
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before
    with pytest.raises(WeirError, match="layout 'features'; it cannot be continued as 'sharded'"):
        run_fake(source, str(tmp_path / "out"))
    run_fake(source, str(tmp_path / "rows"), limit=2)
    with pytest.raises(WeirError, match="layout 'sharded'; it cannot be continued as 'features'"):
        run(source, tmp_path / "rows")


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("top_k", {"top_k": 0}),
        ("top_k", {"top_k": 513}),
        ("top_k", {"top_k": 3, "ids": [1]}),
        ("top_k", {"sae": None, "top_k": 3}),
        ("ids", {"sae": None, "ids": [3]}),
        ("ids", {"ids": [512]}),
        ("ids", {"ids": []}),
        ("sae", {"sae": "mood="}),
        ("sae", {"sae": "/nowhere"}),
        ("sae", {"sae": {}}),
        ("sae", {"sae": {"a": demo_sae(), "b": demo_sae()}}),
        ("sae", {"sae": 3}),
        ("sae", {"sae": {"x" * 300: demo_sae()}}),
        ("hook", {"hook": "mlp_in"}),
        ("layers", {"layers": [2, 3]}),
        ("layers", {"layers": "all"}),
        ("heads", {"heads": [0]}),
        ("neurons", {"neurons": [0]}),
        ("compress", {"compress": "full8"}),
        ("reduce", {"reduce": "mean"}),
        ("dtype", {"dtype": "float16"}),
        ("layout", {"layout": "packed"}),
        ("positions", {"positions": "generated"}),
        ("shard_bytes", {"shard_bytes": 0}),
        ("pack_bytes", {"pack_bytes": 1}),
    ],
)
def test_arguments(field: str, change: dict[str, Any], source: Path, tmp_path: Path) -> None:
    with refused(field, f"^{field}: "):
        run(source, tmp_path / "out", **change)
    assert not list(tmp_path.glob("out/*.parquet"))


def test_a_run_that_was_killed_when_it_had_just_begun(source: Path, tmp_path: Path) -> None:
    """Its folder has a marker, and maybe the description of another autoencoder."""
    for described in (None, "{}"):
        out = tmp_path / str(described)
        run(source, out, limit=1)
        for name in ("extract.json", "features.json", *(path.name for path in out.glob("*.parquet"))):
            (out / name).unlink()
        if described is not None:
            (out / "features.json").write_text(described)
        assert run(source, out, limit=2).requests == 2
        assert load_features(out).info.sae == "mood"


def test_forms_of_the_same_autoencoder(source: Path, tmp_path: Path) -> None:
    """They are the same run: none reads the texts again."""
    run(source, tmp_path / "out", limit=9)
    sae = SAE.load(demo_sae())
    for one in (f"mood={demo_sae()}", f"mood={demo_sae()}@resid_post.3", {"mood": sae}, sae.renamed("mood")):
        assert run(source, tmp_path / "out", sae=one, limit=9, hook="resid_post", layers=3).held == 9
    run(source, tmp_path / "named", sae=demo_sae(), limit=1)
    assert load_features(tmp_path / "named").info.sae == Path(demo_sae()).name


def test_a_full_disk_keeps_what_was_finished(source: Path, tmp_path: Path, full: list[bool]) -> None:
    class Engine(FakeFeatureEngine):
        def read(self, prompts: Any) -> Any:
            full[0] = self.reads == 4
            return super().read(prompts)

    with pytest.raises(WeirError, match="No space left on device"):
        run(source, tmp_path / "out", start_engine=Engine)
    full[0] = False
    assert 24 <= len(load_features(tmp_path / "out")) <= 32
    assert not list((tmp_path / "out").glob(".*.tmp"))
    assert run(source, tmp_path / "out").requests >= 18
    ds = load_features(tmp_path / "out")
    assert all(same_features(ds[record], expected(record)) for record in range(50))


def test_records_that_were_written_twice_count_once(source: Path, tmp_path: Path) -> None:
    """As a worker of Ray may have done that died after it had published."""
    run(source, tmp_path / "out", limit=8)
    text_source, info = open_source(source), load_features(tmp_path / "out").info
    writers = [FeatureWriter(ObjectStore(str(tmp_path / "out")), info) for _ in range(2)]
    for writer, records in zip(writers, ([8, 9], [9, 10])):
        for record in records:
            name = request_id(text_source, record)
            writer.write(FeatureBatch(name, expected(record)))
            writer.finish_request(name)
        writer.flush()
    for tidied in (False, True):
        if tidied:
            writers[0].tidy()
        ds = load_features(tmp_path / "out")
        assert ds.records.tolist() == list(range(11)) and ds.rows == sum(len(expected(r)) for r in range(11))
        assert [one.record for one in ds].count(9) == 1
    tables = [pq.read_table(path) for path in (tmp_path / "out").glob("*.parquet")]
    assert sum(map(len, tables)) == ds.rows


def test_damage_is_named(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out")
    part = sorted((tmp_path / "out").glob("*.parquet"))[0]
    good = part.read_bytes()
    for bad in (b"", good[:-20], good[:40] + bytes([good[40] ^ 255]) + good[41:]):
        part.write_bytes(bad)
        with pytest.raises(WeirError, match=part.name):
            list(load_features(tmp_path / "out"))
    part.write_bytes(good)
    (tmp_path / "out" / "features.json").write_text("{}")
    with pytest.raises(WeirError, match=r"features\.json"):
        load_features(tmp_path / "out")


def test_loaders_name_each_other(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", limit=1)
    with pytest.raises(WeirError, match=r"weir\.load_features"):
        load(tmp_path / "out")
    run_fake(source, str(tmp_path / "rows"), limit=1)
    with pytest.raises(WeirError, match=r"weir\.load "):
        load_features(tmp_path / "rows")
    with pytest.raises(WeirError, match="does not exist"):
        load_features(tmp_path / "none")


def test_an_empty_source_and_an_object_store(tmp_path: Path) -> None:
    source = tmp_path / "t.jsonl"
    source.write_bytes(b"")
    run(source, tmp_path / "out")
    assert len(load_features(tmp_path / "out")) == 0 and not list(load_features(tmp_path / "out"))
    write_jsonl(source, VALUES[:9])
    run_fake(source, "memory://features", sae=MOOD, start_engine=FakeFeatureEngine)
    ds = load_features("memory://features")
    assert all(same_features(ds[record], expected(record)) for record in range(9))


def test_from_the_shell(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extract.__wrapped__.__kwdefaults__, "start_engine", FakeFeatureEngine)
    job = ["extract", str(source), "-m", "fake", "-o", str(tmp_path / "out"), "-q", "--json"]
    chosen = CliRunner().invoke(app, [*job, "--sae", f"mood={demo_sae()}", "--ids", "7,2"])
    assert chosen.exit_code == 0, chosen.output
    assert json.loads(chosen.output)["requests"] == 50
    assert load_features(tmp_path / "out").info.ids == (7, 2)
    for more, field in (
        (["--sae", demo_sae()], "sae"), (["--sae", f"mood={demo_sae()}", "--layers", "all"], "layers"),
        (["--top-k", "3"], "top_k"), (["--sae", f"mood={demo_sae()}", "--ids", "x"], "ids"),
    ):  # fmt: skip
        refused = CliRunner().invoke(app, [*job, *more])
        assert refused.exit_code == 1 and f"Error: {field}: " in refused.output, refused.output


def test_records_of_which_no_token_is_selected_are_done(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", limit=3)
    (tmp_path / "out" / "extract.json").unlink()
    store, info = ObjectStore(tmp_path / "out"), load_features(tmp_path / "out").info
    names = {record: request_id(open_source(source), record) for record in range(3, 8)}
    without = RecordFeatures.without_rows

    def write(*batch: RecordFeatures) -> None:
        with FeatureWriter(store, info) as writer:
            for one in batch:
                writer.write(FeatureBatch(names[one.record], one))
                writer.finish_request(names[one.record])

    write(without(3), expected(4), without(5))
    write(without(6), without(7))
    write(without(5), expected(4))  # as workers of Ray may
    with FeatureWriter(store, info) as writer:
        assert all(writer.holds(name) for name in names.values())
        writer.tidy()
    ds = load_features(tmp_path / "out")
    assert ds.records.tolist() == list(range(8)) and ds.rows == sum(map(len, map(expected, (0, 1, 2, 4))))
    assert [len(ds[record]) for record in (3, 5, 6, 7)] == [0] * 4 and ds[3].dense(512).shape == (0, 512)
    assert same_features(ds[4], expected(4)) and sorted(one.record for one in ds) == list(range(8))
    assert sum(len(table) for table in ds.tables()) == ds.rows and len(part_names(list(store.names()))) == 3


def test_of_a_cross_layer_transcoder_one_block_is_extracted() -> None:
    weights = {"W_enc": [torch.ones(4, 8)] * 2, "b_enc": [torch.zeros(8)] * 2, "b_dec": [torch.zeros(4)] * 2}
    weights["W_dec"] = [torch.ones(8, 2, 4), torch.ones(8, 1, 4)]
    whole = SAE.from_tensors("transcoder", ("mlp_in", 0), name="clt", layers=[0, 1], **weights)
    with refused("sae", "give one of them"):
        FeatureSpec.parse(whole, None, None, "model", "all")
    spec = FeatureSpec.parse(whole.block(1), 3, None, "model", "all")
    assert (spec.site, spec.asked.top_k, spec.info.d_sae) == (("mlp_in", 1), 3, 8)
