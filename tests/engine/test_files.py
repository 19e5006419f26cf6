"""The filesystem sink on a live engine: every layout holds the rows of the run, a full disk fails the request alone."""

from __future__ import annotations

import os

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import vllm_weir as weir
from tests.engine.common import assert_nothing_is_held, directory, frontend, prompts, sampling
from tests.support.engines import get_llm
from tests.support.measure import alike
from vllm_weir.consumers.filesystem import Filesystem
from vllm_weir.storage import load

pytestmark = pytest.mark.engine("default")
THOROUGH = pytest.mark.thorough


class FullFileSystem(MemoryFileSystem):
    """A disk that is full while `full` is set."""

    protocol = "fulldisk"
    full = False

    def put_file(self, *args, **kwargs):
        if FullFileSystem.full:
            raise OSError(28, "No space left on device")
        return super().put_file(*args, **kwargs)


fsspec.register_implementation("fulldisk", FullFileSystem, clobber=True)


def to(sink, compress=None, max_tokens=4, **more):
    capture = weir.Capture("resid_post", [1, 2], sink=sink, compress=compress, **more)
    return weir.params(sampling(max_tokens), capture=capture)


@pytest.mark.parametrize(
    ("layout", "compress"),
    [
        ("sharded", None),
        ("packed", "full8"),
        *(pytest.param(*other, marks=THOROUGH) for other in (("sharded", "full8"), ("packed", None))),
        *(pytest.param("per_request", compress, marks=THOROUGH) for compress in (None, "full8")),
    ],
)
def test_layouts_hold_the_rows(llm, tmp_path, layout, compress):
    sink = {"filesystem": {"url": str(tmp_path / "rows"), "layout": layout, "ids": "caller", "fsync": True}}
    lengths = (5, 9, 30)
    both = [weir.Capture("resid_post", [1, 2], sink=where, compress=compress) for where in (sink, "memory")]
    outs = llm.generate(prompts(lengths), weir.params(sampling(4), capture=both), use_tqdm=False)
    weir.flush(llm)
    kept = load(str(tmp_path / "rows"))
    assert sorted(kept) == sorted(out.request_id for out in outs)
    for out in outs:
        acts = kept[out.request_id]
        assert out.receipt.sinks == {"filesystem": "written"} and out.receipt.files
        assert all(os.path.exists(file) for file in out.receipt.files)
        for layer in (1, 2):
            assert acts["resid_post", layer].equal(out.activations["resid_post", layer])
            assert acts.positions_of("resid_post", layer).equal(out.activations.positions_of("resid_post", layer))
            assert acts.token_ids_of("resid_post", layer).equal(out.activations.token_ids_of("resid_post", layer))
    assert not [f for f in os.listdir(tmp_path / "rows") if f.endswith(".tmp")]


@pytest.mark.parametrize("layout", ["packed", *(pytest.param(x, marks=THOROUGH) for x in ("per_request", "sharded"))])
def test_rows_say_what_they_are(llm, tmp_path, layout):
    """Requests of one batch, each with rows of another kind, those that are treated late too."""
    sink = {"filesystem": {"url": str(tmp_path / "rows"), "layout": layout, "ids": "caller"}}
    both = {"hook": "resid_post", "layers": [1, 2]}
    kinds = [
        ({}, None),
        ({"reduce": "mean", "positions": "-2:"}, both | {"reduce": "mean", "positions": "-2:"}),
        ({"project": torch.ones(2, 128)}, both | {"project": 2}),
        ({"before": True}, both | {"before": True}),
        ({"reduce": "last", "project": torch.ones(1, 128)}, both | {"reduce": "last", "project": 1}),
        ({"positions": "last_prompt"}, both | {"positions": "last_prompt"}),
    ]
    late = [weir.Capture("resid_post", 1), weir.Capture(sink=sink, reduce="max")]
    asked = [*(to(sink, **fields) for fields, _ in kinds), weir.params(sampling(4), capture=late)]
    outs = llm.generate(prompts([9] * len(asked)), asked, use_tqdm=False)
    weir.flush(llm)
    kept = load(str(tmp_path / "rows"))
    expected = [*(told for _, told in kinds), {"hook": "resid_post", "layers": "all", "reduce": "max"}]
    for out, told in zip(outs, expected, strict=True):
        assert kept.metadata(out.request_id).get("capture") == (None if told is None else [told])
    name = [out.request_id for out in outs]
    assert kept.rows(("resid_post", 1), [name[0], name[3], name[5]], positions="last_prompt").rows.shape == (3, 128)
    for reduced in (name[1], name[6]):
        with pytest.raises(weir.WeirError, match=f"request '{reduced}' is the m"):
            kept.rows(("resid_post", 1), [name[0], reduced], positions="last_prompt")
    with pytest.raises(weir.WeirError, match=r"resid_post\[1\] differ in width"):
        kept.rows(("resid_post", 1))
    del outs, out
    assert_nothing_is_held(llm)


def test_aborted_and_unmarked_requests_leave_nothing(llm, tmp_path):
    sink = {"filesystem": {"url": str(tmp_path / "rows")}}
    kept = llm.generate(prompts([5]), to(sink), use_tqdm=False)[0]
    for keep in ("always", "marked"):
        llm.llm_engine.add_request("gone", prompts([30])[0], to(sink, max_tokens=50, keep=keep))
        for _ in range(3):
            llm.llm_engine.step()
        llm.llm_engine.abort_request(["gone"])
    assert not len(frontend(llm).manager.marks)
    with pytest.raises(weir.WeirError, match="aborted"):
        weir.mark("gone", llm=llm)
    held = llm.generate(prompts([6]), to(sink, keep="marked"), use_tqdm=False)[0]
    weir.flush(llm)
    assert len(load(str(tmp_path / "rows"))) == 1
    (ticket,) = weir.mark(held.request_id, llm=llm, why="odd")
    (file,) = ticket.wait(60)
    assert os.path.dirname(file) == str(tmp_path / "rows") and len(load(str(tmp_path / "rows"))) == 2
    assert os.path.exists(kept.receipt.files[0])
    del kept, held, ticket
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("layout", ["per_request", *(pytest.param(x, marks=THOROUGH) for x in ("packed", "sharded"))])
def test_a_full_disk_fails_the_request_and_not_the_engine(llm, layout):
    sink = {"filesystem": {"url": f"fulldisk://{layout}", "layout": layout, "flush_seconds": 0}}
    assert llm.generate(prompts([5]), to(sink), use_tqdm=False)[0].receipt.files
    FullFileSystem.full = True
    try:
        with pytest.raises(weir.WeirError, match="No space left"):
            llm.generate(prompts([6]), to(sink), use_tqdm=False)
        assert not llm.llm_engine.has_unfinished_requests()
        beside = llm.generate(prompts([6]), to("memory"), use_tqdm=False)[0]
        assert len(beside.activations["resid_post", 1]) == 9
    finally:
        FullFileSystem.full = False
    out = llm.generate(prompts([7]), to(sink), use_tqdm=False)[0]
    assert out.receipt.sinks == {"filesystem": "written"}
    weir.flush(llm)
    lengths = sorted(len(acts.positions) for acts in load(f"fulldisk://{layout}").values())
    assert lengths == [8, 10], "the failed one left nothing"


def test_a_request_that_fails_takes_nothing_from_the_others(llm, tmp_path, monkeypatch):
    """Their outputs come with the error, wherever in the batch it stands."""

    def broken(*_):
        raise OSError("the disk is gone")

    here = weir.params(sampling(2), capture=weir.Capture("resid_post"))
    sink = {"filesystem": {"url": str(tmp_path / "rows"), "layout": "per_request"}}
    lost = weir.params(sampling(2), capture=weir.Capture("resid_post", sink=sink))
    (alone,) = llm.generate(prompts([9]), here, use_tqdm=False)
    monkeypatch.setattr(Filesystem, "finish", broken)
    for at in range(3):
        asked = [here, here]
        asked.insert(at, lost)
        with pytest.raises(weir.WeirError, match="the disk is gone") as caught:
            llm.generate(prompts([9]) * 3, asked, use_tqdm=False)
        outputs = caught.value.outputs
        assert len(outputs) == 3
        with pytest.raises(weir.WeirError, match="the disk is gone"):
            outputs.pop(at).receipt  # noqa: B018
        for out in outputs:
            assert out.outputs[0].token_ids == alone.outputs[0].token_ids and out.receipt.complete
            for site in alone.activations.sites:
                assert alike(out.activations[site], alone.activations[site])
    del outputs, out, alone, caught
    assert_nothing_is_held(llm)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "url"),
        ({"url": "/dev/null/x"}, ""),
        ({"url": "nosuch://x"}, ""),
        ({"url": "X", "layout": "tape"}, None),
        ({"url": "X", "ids": "mine"}, "ids"),
        ({"url": "X", "flush_seconds": -1}, "flush_seconds"),
        ({"url": "X", "colour": "red"}, None),
    ],
)
def test_what_cannot_be_opened_is_refused(llm, tmp_path, options, field):
    if options.get("url") == "X":
        options = options | {"url": str(tmp_path / "rows")}
    with pytest.raises(weir.WeirError) as e:
        llm.generate(prompts([4]), to({"filesystem": options}), use_tqdm=False)
    assert e.value.field.startswith("capture[0].sink.filesystem")
    if field:
        assert e.value.field.endswith(f".{field}")
    assert not llm.llm_engine.has_unfinished_requests()


def test_the_environment_of_vllm_mi_patch(root, tmp_path, monkeypatch):
    """Every request, all blocks, in its directories and field names, beside whatever else is there."""
    others = {"notes.txt": b"mine", ".DS_Store": b"", "other.npz": b"x", "req_x/manifest.json": b'{"mode": "rp8"}'}
    for name, data in others.items():
        (tmp_path / "acts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "acts" / name).write_bytes(data)
    for name, value in {"CAPTURE": "1", "MODE": "full8", "OUTDIR": str(tmp_path / "acts"), "RETURN": "sharded"}.items():
        monkeypatch.setenv(f"VLLM_ACT_{name}", value)
    llm = get_llm(directory(root), seed=1, keep=2)  # settings are read when an engine starts
    outs = llm.generate(prompts([5, 9]), sampling(4), use_tqdm=False)
    for out in outs:
        assert out.activations is None and out.receipt.sinks == {"VLLM_ACT": "written"}
    weir.flush(llm)
    folders = [p for p in (tmp_path / "acts").iterdir() if p.is_dir() and p.name != "req_x"]
    assert len(folders) == len(weir.load(tmp_path / "acts")) == 2
    assert {name: (tmp_path / "acts" / name).read_bytes() for name in others} == others
    rows = []
    for folder in folders:
        files = {p.name for p in folder.glob("*.npz")}
        assert files >= {f"seq0_layer{layer}_rank0.npz" for layer in range(4)}
        with np.load(folder / "seq0_layer2_rank0.npz", allow_pickle=False) as kept:
            assert {"q", "scale", "zero"} <= set(kept.files) and kept["q"].dtype == np.uint8
            rows.append(len(kept["q"]))
    assert sorted(rows) == [8, 12]
