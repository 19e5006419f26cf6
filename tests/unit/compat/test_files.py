"""Files that others wrote: Vllm_mi_patch's npz, vLLM's own hidden states, the captures of RhizoNymph's fork."""

from __future__ import annotations

import fcntl
import gc
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.support.machine import module, needs
from tests.unit.mi_patch import codes_of, top_codes, write_request
from vllm_weir.errors import MissingFile, StoreError, WeirError
from vllm_weir.storage import Batch, convert, load, open_writer
from vllm_weir.storage.record_blocks import ArrayBlock
from vllm_weir.storage.stats import inspect
from vllm_weir.storage.verify import verify

D, N = 32, 6


@pytest.fixture
def mi_patch(tmp_path: Path) -> tuple[Path, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
    return tmp_path, write_request(tmp_path / "req_1-abcdef01", (0, 10), x)


def test_mi_patch_rows_by_the_inverse_that_fits_its_code(mi_patch: tuple[Path, np.ndarray]) -> None:
    path, x = mi_patch
    for dataset in (
        load(path),
        load(path / "req_1-abcdef01"),
        load(path / "req_1-abcdef01" / "seq0_layer10_rank0.npz"),
    ):
        (request,) = dataset.requests
        got = dataset[request]["resid_post", 10].numpy()
        step = (x.max(-1) - x.min(-1))[:, None] / 255
        assert (np.abs(got - x) <= 1.01 * step).all()
        assert dataset[request].token_ids.tolist() == [-1] * N
        assert any("Vllm_mi_patch" in note for note in dataset.index.notes)


def test_mi_patch_scales_per_dimension_keep_nothing_and_say_so(tmp_path: Path) -> None:
    file = tmp_path / "seq0_layer3_rank0.npz"
    np.savez_compressed(file, q=np.zeros((N, D), np.uint8), scale=np.zeros((N, D)), zero=np.zeros((N, D)))
    dataset = load(file)
    with pytest.raises(WeirError, match=r"seq0_layer3_rank0.npz: its scales are per dimension .* keeps no values"):
        dataset.rows(("resid_post", 3))


def test_mi_patch_topk8_needs_its_width_and_unwraps_indices(tmp_path: Path) -> None:
    d = 40_000
    values = np.array([[3.0, -4.0, 5.0]], np.float32)
    file = tmp_path / "seq0_layer0_rank0.npz"
    np.savez_compressed(file, **top_codes(values, [[1, 39_999, 7]]))  # 39,999 wraps
    unknown = load(file)
    assert unknown.requests == ["request"] and unknown.count() == 1
    with pytest.raises(WeirError, match=r"seq0_layer0_rank0\.npz: .* pass hidden_size") as e:
        unknown.rows(("resid_post", 0))
    assert e.value.field == "hidden_size" and any("pass hidden_size" in note for note in unknown.index.notes)
    row = load(file, hidden_size=d).rows(("resid_post", 0)).rows[0]
    assert row.nonzero()[:, 0].tolist() == [1, 7, 39_999]
    assert torch.allclose(row[[1, 39_999, 7]], torch.tensor([3.0, -4.0, 5.0]), atol=0.05)
    with pytest.raises(WeirError, match="outside a row"):
        load(file, hidden_size=100).rows(("resid_post", 0))


@pytest.mark.parametrize("manifest", ["", "{", "[]", '{"sequences": {"0": {"layers": {"4": {"shape": [3, -1]}}}}}'])
def test_mi_patchs_manifest_says_how_wide_topk8_is(manifest: str, tmp_path: Path) -> None:
    folder = tmp_path / "req_1-abc"
    folder.mkdir()
    stored = top_codes(np.array([[3.0, -4.0, 5.0]], np.float32), [[1, 30, 7]])
    np.savez_compressed(folder / "seq0_layer4_rank0.npz", **stored)
    (folder / "manifest.json").write_text(manifest)
    with pytest.raises(WeirError, match="pass hidden_size"):
        load(tmp_path).rows(("resid_post", 4))
    (site,) = inspect(load(tmp_path)).sites
    assert site.rows == 1 and site.norm is None  # counted, and no figures of rows that cannot be made
    layers = {"4": {"path": "/gone/seq0_layer4_rank0.npz", "shape": [28, D]}}
    text = json.dumps({"mode": "ActMode.TOPK8", "sequences": {"0": {"prompt_len": 1, "layers": layers}}})
    (folder / "manifest.json").write_text(text)
    for url in (tmp_path, folder, folder / "seq0_layer4_rank0.npz"):
        dataset = load(url)
        assert dataset.rows(("resid_post", 4)).rows[0].nonzero()[:, 0].tolist() == [1, 7, 30]
        assert inspect(dataset).sites[0].d_model == D
    assert load(tmp_path, hidden_size=64).rows(("resid_post", 4)).rows.shape == (1, 64)


def test_a_damaged_file_is_noted_and_found(mi_patch: tuple[Path, np.ndarray]) -> None:
    path, _ = mi_patch
    file = path / "req_1-abcdef01" / "seq0_layer10_rank0.npz"
    file.write_bytes(file.read_bytes()[:100])
    dataset = load(path)
    assert dataset["req_1-abcdef01"]["resid_post", 0].shape == (N, D)
    (note,) = (n for n in dataset.index.notes if "damaged" in n)
    assert str(file) in note
    (damage,) = verify(dataset).damaged
    assert damage.file == str(file)
    assert {site.norm is None for site in inspect(dataset).sites} == {False, True}
    for url in (file, file.parent):
        if url == file.parent:
            (file.parent / "seq0_layer0_rank0.npz").unlink()
        with pytest.raises(WeirError, match=r"seq0_layer10_rank0\.npz: is not an npz file, or is damaged"):
            load(url)


@needs(module("aiohttp"))
def test_a_refused_connection_is_not_a_missing_file() -> None:
    with pytest.raises(StoreError, match=r"cannot read http://127\.0\.0\.1:1/x: ") as e:
        load("http://127.0.0.1:1/x")
    assert not isinstance(e.value, MissingFile)
    with pytest.raises(MissingFile):
        load("memory://nothing/here")


def test_a_dataset_that_is_gone_leaves_no_rows_to_the_next(tmp_path: Path) -> None:
    """Unpacked arrays are kept for their block only: another at the same address reads its own file."""
    file = tmp_path / "seq0_layer0_rank0.npz"
    for i in range(3):
        codes = codes_of((i + 1) * np.arange(D, dtype=np.float32)[None])  # from 0 on
        np.savez(file, **codes)
        dataset = load(file)
        got = dataset.rows(("resid_post", 0)).rows.numpy()
        assert np.array_equal(got, codes["q"] * codes["scale"][:, None])
        del dataset
        gc.collect()
        assert not ArrayBlock._recent


def test_pickled_arrays_are_never_loaded(tmp_path: Path) -> None:
    file = tmp_path / "seq0_layer0_rank0.npz"
    np.savez(file, q=np.array([[{}]], dtype=object), scale=np.ones(1), zero=np.zeros(1))
    with pytest.raises(WeirError, match="seq0_layer0"):
        load(file).rows(("resid_post", 0))


def test_vllms_own_hidden_states(tmp_path: Path) -> None:
    states = torch.randn(N, 3, D).bfloat16()
    for name in ("0-abc", "1-def"):
        save_file({"hidden_states": states, "token_ids": torch.arange(N) + 50}, tmp_path / f"{name}.safetensors")
    with pytest.raises(WeirError, match="layer_ids"):
        load(tmp_path)
    dataset = load(tmp_path, layer_ids=[0, 5, 12])
    assert dataset.requests == ["0-abc", "1-def"]
    assert list(map(tuple, dataset.sites)) == [("resid_pre", 0), ("resid_post", 4), ("resid_post", 11)]
    acts = dataset["1-def"]
    assert torch.equal(acts["resid_post", 4], states[:, 1]) and torch.equal(acts["resid_pre", 0], states[:, 0])
    assert acts.token_ids.tolist() == list(range(50, 50 + N))
    assert torch.equal(dataset.rows(("resid_post", 11), positions=[2, 4]).rows, states[[2, 4, 2, 4], 2])
    with pytest.raises(WeirError, match="3 layers, got 2"):
        load(tmp_path, layer_ids=[0, 5])
    with open(tmp_path / "0-abc.safetensors.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(WeirError, match=r"0-abc.safetensors: is still being written"):
            load(tmp_path, layer_ids=[0, 5, 12])
    assert len(load(tmp_path, layer_ids=[0, 5, 12])) == 2


def raw(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def capture(path: Path, request: str, at: int, point: str, rows: torch.Tensor, **changed: object) -> None:
    """Write one capture of the fork, and what is said of it but for what is changed."""
    path.mkdir(parents=True, exist_ok=True)
    (path / f"{at}_{point}.bin").write_bytes(raw(rows))
    dtype = str(rows.dtype).removeprefix("torch.")
    about = {"request_id": request, "layer": at, "hook": point, "shape": list(rows.shape), "dtype": dtype} | changed
    (path / f"{at}_{point}.json").write_text(json.dumps(about))


def test_runs_side_by_side_are_told_apart(tmp_path: Path) -> None:
    for k, run in enumerate(("a", "b")):
        rows = torch.full((N, D), float(k))
        (tmp_path / "native" / run).mkdir(parents=True)
        states = {"hidden_states": rows[:, None].contiguous(), "token_ids": torch.arange(N)}
        save_file(states, tmp_path / "native" / run / "0.safetensors")
        (tmp_path / "npz" / run / "req_1").mkdir(parents=True)
        q = np.full((N, D), k, np.uint8)
        np.savez(tmp_path / "npz" / run / "req_1" / "seq0_layer3_rank0.npz", q=q, scale=np.ones(N), zero=np.zeros(N))
        capture(tmp_path / "fork" / run / "r1", "r1", 3, "post_block", rows)  # its tags
    for kind, request, more in (("native", "0", {"layer_ids": [4]}), ("npz", "req_1", {}), ("fork", "r1", {})):
        dataset = load(tmp_path / kind, **more)
        assert sorted(dataset.requests) == [f"a/{request}", f"b/{request}"]
        for k, run in enumerate(("a", "b")):
            assert torch.equal(dataset[f"{run}/{request}"]["resid_post", 3], torch.full((N, D), float(k)))
        if kind != "npz":
            assert load(tmp_path / kind / "b", **more).requests == [request]


def test_the_forks_files(tmp_path: Path) -> None:
    x = torch.randn(N, D).bfloat16()
    one = tmp_path / "run" / "r1"
    capture(one, "r1", 4, "post_mlp", x)
    two = tmp_path / "run" / "r2"
    two.mkdir()
    (two / "packed.bin").write_bytes(raw(x[:4]) + raw(x.flip(0)) + raw(x[4:]))
    entries = [
        {"layer": 4, "hook": "post_mlp", "offset": 0, "nbytes": 4 * D * 2, "shape": [4, D], "positions": [0, 1, 2, 3]},
        {"layer": 5, "hook": "pre_attn", "offset": 4 * D * 2, "nbytes": N * D * 2, "shape": [N, D]},
        # position 3 again: a rejected draft, then the token that counts
        {
            "layer": 4,
            "hook": "post_mlp",
            "offset": (4 + N) * D * 2,
            "nbytes": 2 * D * 2,
            "shape": [2, D],
            "positions": [3, 4],
        },
    ]
    index = {"request_id": "r2", "layout": "packed", "dtype": "bfloat16", "entries": entries}
    (two / "packed.json").write_text(json.dumps(index))
    (tmp_path / "run" / "shard-000-000001.bin").write_bytes(raw(x.float()))
    entry = {"request_id": "r3", "layer": 0, "hook": "post_attn", "offset": 0, "nbytes": N * D * 4, "shape": [N, D]}
    shard = {"dtype": "float32", "seq": 1, "entries": [entry | {"positions": list(range(N))}]}
    (tmp_path / "run" / "shard-000-000001.json").write_text(json.dumps(shard))
    dataset = load(tmp_path)
    assert sorted(dataset.requests) == ["r1", "r2", "r3"]
    assert torch.equal(dataset["r1"]["resid_post", 4], x)
    assert torch.equal(dataset["r2"]["resid_post", 4], torch.stack([x[0], x[1], x[2], x[4], x[5]]))
    assert dataset["r2"].positions_of("resid_post", 4).tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(dataset["r2"]["resid_pre", 5], x.flip(0))
    assert torch.equal(dataset["r3"]["resid_mid", 0], x.float())
    assert load(one / "4_post_mlp.bin").requests == ["r1"]

    (two / "packed.bin").write_bytes(raw(x[:4]))
    with pytest.raises(WeirError, match=r"packed.bin: truncated"):
        load(tmp_path)
    for change in ({"shape": [N]}, {"dtype": "float64"}, {"hook": "nose"}, {"layer": -1}, {"positions": [0]}):
        capture(one, "r1", 4, "post_mlp", x, **change)
        with pytest.raises(WeirError, match=r"4_post_mlp.json"):
            load(one)


def test_what_is_converted_for_the_forks_reader_is_read_back(tmp_path: Path) -> None:
    """Every number of a site's description has the meaning that the fork's reader gives it."""
    with open_writer(tmp_path / "own", "per_request") as writer:
        for k, (hook, dtype) in enumerate([("resid_post", "bfloat16"), ("resid_pre", "float16"), ("q", "float32")]):
            shape = (N, 2, D // 2) if hook == "q" else (N, D)
            rows = torch.randn(shape, generator=torch.Generator().manual_seed(k)).to(getattr(torch, dtype))
            writer.write(Batch("a/../b", hook, k, np.arange(N) * 2, np.arange(N), rows))
        writer.finish_request("a/../b", {"prompt_tokens": 3})
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "x").write_text("")
    with pytest.raises(WeirError, match="not empty"):
        convert(tmp_path / "own", tmp_path / "packed", "fork")
    with pytest.raises(WeirError, match="plain rows"):
        convert(tmp_path / "own", tmp_path / "fork", "fork", compress="rp8")
    assert convert(tmp_path / "own", tmp_path / "fork", "fork") == 1
    own, (folder,) = load(tmp_path / "own"), (tmp_path / "fork").iterdir()
    assert sorted(file.name for file in folder.glob("*.bin")) == ["0_post_block.bin", "1_pre_attn.bin", "2_q.bin"]
    for site in own.sites:
        name = {"resid_post": "post_block", "resid_pre": "pre_attn"}.get(site.hook, site.hook)
        said = json.loads((folder / f"{site.layer}_{name}.json").read_text())
        assert (said["request_id"], said["layer"], said["hook"]) == ("a/../b", site.layer, name)
        raw = torch.frombuffer(bytearray((folder / f"{site.layer}_{name}.bin").read_bytes()), dtype=torch.uint8)
        rows = raw.view(getattr(torch, said["dtype"])).view(said["shape"])
        assert torch.equal(rows, own["a/../b"][site].flatten(1)) and said["positions"] == list(range(0, 2 * N, 2))
    back = load(tmp_path / "fork")
    assert back.requests == ["a/../b"] and torch.equal(back["a/../b"]["resid_post", 0], own["a/../b"]["resid_post", 0])


def test_the_forks_points_without_a_name_are_left_out_and_said(tmp_path: Path) -> None:
    x = torch.randn(N, D)

    for layer in (3, 4):
        capture(tmp_path / "r1", "r1", layer, "nose", x + layer)
    with pytest.raises(WeirError, match=r"3_nose.json: no capture is left .* 2 x 'nose' \(blocks 3, 4\)"):
        load(tmp_path)
    for request, layer, hook in (("r1", 4, "post_mlp"), ("r1", 4, "mlp_in"), ("r2", 5, "nose")):
        capture(tmp_path / request, request, layer, hook, x + layer)
    packed = [
        {"layer": 0, "hook": "nose", "offset": 0, "shape": [N, D]},
        {"layer": 0, "hook": "pre_attn", "offset": N * D * 4, "shape": [N, D]},
    ]
    (tmp_path / "r3").mkdir()
    (tmp_path / "r3" / "packed.bin").write_bytes(raw(x) + raw(-x))
    (tmp_path / "r3" / "packed.json").write_text(json.dumps({"request_id": "r3", "entries": packed}))
    dataset = load(tmp_path)
    assert dataset.requests == ["r1", "r3"]
    assert {r: list(map(tuple, acts.sites)) for r, acts in dataset.items()} == {
        "r1": [("mlp_in", 4), ("resid_post", 4)],
        "r3": [("resid_pre", 0)],
    }
    assert torch.equal(dataset["r1"]["mlp_in", 4], x + 4)
    assert torch.equal(dataset["r1"]["resid_post", 4], x + 4) and torch.equal(dataset["r3"]["resid_pre", 0], -x)
    (note,) = (n for n in dataset.index.notes if "left out" in n)
    assert note == (
        "left out, as Weir has no such hook point: 4 x 'nose' (blocks 0, 3, 4, 5); requests that hold nothing else: 1"
    )
    (tmp_path / "r1" / "4_post_mlp.json").write_text(json.dumps({"request_id": "r1", "layer": 4, "hook": 7}))
    with pytest.raises(WeirError, match=r"4_post_mlp.json: is not a description"):
        load(tmp_path)
