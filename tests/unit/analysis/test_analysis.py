"""The analysis functions against numpy, on Weir's files and on Vllm_mi_patch's, and the pictures."""

from __future__ import annotations

import enum
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.machine import module, needs
from tests.unit.mi_patch import codes_of, write_request
from tests.unit.refusals import refused
from tests.unit.stored import D, length_of, make, rows_of
from vllm_weir import analysis
from vllm_weir.codec import decode, encode, project
from vllm_weir.errors import MissingFile, WeirError
from vllm_weir.schema.compression import Compression
from vllm_weir.storage import LAYOUTS, Batch, load, open_writer

RP8 = {"method": "rp8", "k": 32, "seed": 1}
STORY = {0: np.arange(12.0).reshape(4, 3), 3: np.arange(12.0, 24).reshape(4, 3)}


def expected(name: str, method: str | dict, space: str = "projected") -> torch.Tensor:
    rows = rows_of(name, "resid_post", 3, length_of(name))
    compression = Compression.parse(method)
    header = compression.header(D, "bfloat16")
    records = encode(rows, compression)
    projected = compression.method == "rp8" and space == "projected"
    return project(records, header) if projected else decode(records, header)


@pytest.mark.parametrize("method", ["full8", {"method": "topk8", "k": 16}])
def test_the_bare_fields_of_weirs_files_mean_the_same(method: str | dict, tmp_path: Path) -> None:
    make(tmp_path, "npz", ["a"], compress=method)
    with np.load(tmp_path / "req_a" / "seq0_layer3_rank0.npz") as data:
        fields = {key: data[key] for key in ("q", "indices", "values", "scale", "zero") if key in data.files}
    mode = Compression.parse(method).method
    rows = analysis.reconstruct_activations(fields, mode, hidden_size=D)
    np.testing.assert_allclose(rows, expected("a", method).numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loader_reads_every_layout(layout: str, tmp_path: Path) -> None:
    make(tmp_path, layout, ["b", "a"], compress=RP8)
    loader = analysis.ActivationLoader(tmp_path, mode="rp8")
    assert loader.list_requests() == (["req_a", "req_b"] if layout == "npz" else ["a", "b"])
    for name in ("a", "req_a"):
        found = loader.load_request(name, reconstruct=True)
        assert list(found) == [0] and list(found[0]) == [0, 3]
        assert isinstance(found[0][3], np.ndarray)
        np.testing.assert_allclose(found[0][3], expected("a", RP8), atol=0.1)
    raw = loader.load_request("a", reconstruct=False)[0][3]
    assert raw["positions"].tolist() == list(range(length_of("a")))
    assert loader.load_request("a", True, space="model")[0][3].shape[1] == D
    for space in ("model", "projected"):  # of what is stored either can be made, however it was loaded
        for stored in (raw, loader.load_request("a", space="model")[0][3]):
            made = analysis.reconstruct_activations(stored, space=space)
            np.testing.assert_array_equal(made, loader.load_request("a", True, space=space)[0][3])
    sequence = analysis.load_sequence_activations(tmp_path, "a", layers=[3], return_torch=True)
    assert list(sequence) == [3] and isinstance(sequence[3]["activations"], torch.Tensor)
    if layout == "npz":  # as stored, with the fields that Vllm_mi_patch's readers look for
        assert sequence[3]["q"].dtype == torch.uint8 and raw["q"].shape == (length_of("a"), 32) and "scale" in raw
    np.testing.assert_allclose(analysis.reconstruct_activations(raw, "rp8"), found[0][3], rtol=0, atol=1e-6)
    np.testing.assert_array_equal(analysis.quick_load(tmp_path, layer=3), found[0][3])
    for three in (torch.tensor(3), np.array(3), np.int64(3)):
        np.testing.assert_array_equal(analysis.quick_load(tmp_path, layer=three), found[0][3])
        assert list(analysis.load_sequence_activations(tmp_path, "a", layers=[three])) == [3]
        np.testing.assert_array_equal(analysis.create_token_timeline(found[0], three), found[0][3])
    assert loader.compute_layer_statistics(found[0]) == analysis.compute_layer_statistics(found[0])
    np.testing.assert_array_equal(loader.create_token_timeline(found[0], 3), found[0][3])
    assert list(analysis.ActivationLoader(tmp_path, hook="pre_attn").load_request("a")[0]) == [0]
    for call, field in [
        (lambda: loader.load_request("c"), "request_id"), (lambda: analysis.quick_load(tmp_path, layer=1), "layer"),
        (lambda: analysis.load_sequence_activations(tmp_path, "a", 1), "sequence_id"),
        (lambda: analysis.load_sequence_activations(tmp_path, "a", layers=[1]), "layers"),
        (lambda: analysis.load_sequence_activations(tmp_path, "a", layers=[]), "layers"),
        (lambda: analysis.ActivationLoader(tmp_path, mode="svd"), "mode"),
    ]:  # fmt: skip
        with refused(field):
            call()


def test_sequences_of_mi_patch(tmp_path: Path) -> None:
    folder = tmp_path / "req_7-0123abcd"
    folder.mkdir()
    q = np.arange(20, dtype=np.uint8).reshape(4, 5)
    for sequence in (0, 1):
        np.savez(
            folder / f"seq{sequence}_layer2_rank0.npz", q=q + sequence, scale=np.full(4, 2.0), zero=np.full(4, 10.0)
        )
    loader = analysis.ActivationLoader(tmp_path)
    assert loader.list_requests() == ["req_7-0123abcd"]
    found = loader.load_request("req_7-0123abcd", reconstruct=True)
    np.testing.assert_array_equal(found[1][2], (q.astype(float) + 1 - 10) * 2)
    file = analysis.load_activation_file(folder / "seq0_layer2_rank0.npz")
    np.testing.assert_array_equal(analysis.reconstruct_activations(file, "rp8"), (q.astype(float) - 10) * 2)
    raw = loader.load_request("req_7-0123abcd")[1][2]
    assert raw["q"].tolist() == (q + 1).tolist() and {"scale", "zero", "positions"} <= set(raw)
    np.testing.assert_array_equal(loader.create_token_timeline({2: raw}, 2), found[1][2])
    with pytest.raises(WeirError, match="not the fields of topk8"):
        analysis.reconstruct_activations(file, "topk8")
    with pytest.raises(WeirError, match="has no field zero"):
        analysis.reconstruct_activations({k: v for k, v in file.items() if k != "zero"})


def test_a_sequence_of_mi_patchs_topk8_can_be_told_its_width(tmp_path: Path) -> None:
    """The error says to pass hidden_size, so every function takes it."""
    (tmp_path / "req_1").mkdir()
    stored = {
        "indices": np.array([[1, 6], [0, 7]], np.int16),
        "values": np.array([[255, 0], [0, 255]], np.uint8),
        "scale": np.full(2, 0.5, np.float32),
        "zero": np.zeros(2, np.float32),
    }
    np.savez(tmp_path / "req_1" / "seq0_layer2_rank0.npz", **stored)
    raw = analysis.load_sequence_activations(tmp_path, "req_1")[2]
    assert set(raw) == {*stored, "positions", "token_ids"} and raw["positions"].tolist() == [0, 1]
    loader = analysis.ActivationLoader(tmp_path)
    assert set(loader.load_request("req_1")[0][2]) == set(raw)
    for call in (
        lambda: loader.load_request("req_1", reconstruct=True),
        lambda: analysis.quick_load(tmp_path, layer=2),
        lambda: analysis.reconstruct_activations(raw, "topk8"),
        lambda: loader.create_token_timeline({2: raw}, 2),
    ):
        with refused("hidden_size", "pass hidden_size"):
            call()
    found = analysis.load_sequence_activations(tmp_path, "req_1", hidden_size=8)[2]
    assert found["activations"].tolist() == [[0, 127.5, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 127.5]]
    assert all(np.array_equal(found[name], array) for name, array in stored.items())
    np.testing.assert_array_equal(analysis.quick_load(tmp_path, layer=2, hidden_size=8), found["activations"])


def test_a_loader_reads_nothing_before_it_is_asked(tmp_path: Path) -> None:
    """Programs make it before there is an engine that writes, and for its methods alone."""
    assert analysis.ActivationLoader(tmp_path / "none").compute_similarity(np.ones(3), np.ones(3)) == 1
    with pytest.raises(FileNotFoundError):
        analysis.ActivationLoader(tmp_path / "none").list_requests()
    loader = analysis.ActivationLoader(tmp_path, "rp8")
    assert loader.list_requests() == []
    with pytest.raises(MissingFile, match="has no request 'req_1'; it is empty"):
        loader.load_request("req_1")
    write_request(tmp_path / "req_1", (0,))
    assert loader.list_requests() == ["req_1"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("hi")
    with pytest.raises(WeirError, match="holds no activations"):
        analysis.ActivationLoader(tmp_path / "other").list_requests()


def test_a_request_that_is_not_there_is_a_missing_file(tmp_path: Path) -> None:
    write_request(tmp_path / "req_1", (0,))
    for call in (
        lambda: analysis.ActivationLoader(tmp_path).load_request("req_2"),
        lambda: analysis.load_sequence_activations(tmp_path, "req_2"),
        lambda: analysis.quick_load(tmp_path, "req_2"),
    ):
        with pytest.raises(MissingFile, match="has no request 'req_2'; it has req_1") as e:
            call()
        assert isinstance(e.value, FileNotFoundError) and e.value.field == "request_id"


def test_names_of_npz_requests_are_their_folders(tmp_path: Path) -> None:
    names = ["a", "req_a", "an id/with * everything"]
    make(tmp_path, "npz", names, compress="full8")
    loader = analysis.ActivationLoader(tmp_path)
    assert loader.list_requests() == sorted(p.name for p in tmp_path.iterdir() if p.is_dir())
    for name in loader.list_requests():
        assert (tmp_path / name / "manifest.json").exists()
        request = analysis.load_activation_manifest(tmp_path / name / "manifest.json")["request_id"]
        np.testing.assert_array_equal(loader.load_request(name, True)[0][3], expected(request, "full8"))
    for request in ("a", names[2]):
        np.testing.assert_array_equal(loader.load_request(request, True)[0][3], expected(request, "full8"))
    one = analysis.ActivationLoader(tmp_path / "req_a")
    assert one.list_requests() == ["req_a"] and one.load_request("a") and one.load_request("req_a")
    (tmp_path.parent / "runs").mkdir()
    tmp_path.rename(tmp_path.parent / "runs" / "one")
    assert analysis.ActivationLoader(tmp_path.parent / "runs").list_requests() == loader.list_requests()


def test_modes_as_the_manifests_of_mi_patch_name_them(tmp_path: Path) -> None:
    codes = codes_of(np.random.default_rng(0).normal(size=(4, 6)))
    top = {"indices": np.arange(24).reshape(4, 6), "values": codes["q"], "scale": codes["scale"], "zero": codes["zero"]}
    plain = analysis.reconstruct_activations(codes)
    for mode in ("ActMode.RP8", "ActMode.FULL8", Mode.RP8):
        np.testing.assert_array_equal(analysis.reconstruct_activations(codes, mode), plain)
        analysis.ActivationLoader(tmp_path, mode=mode)
    for mode in ("ActMode.TOPK8", Mode.TOPK8):
        assert analysis.reconstruct_activations(top, mode, hidden_size=24).shape == (4, 24)
        with pytest.raises(WeirError, match="not the fields of topk8"):
            analysis.reconstruct_activations(codes, mode)
    with pytest.raises(WeirError, match=r"unknown mode 'ActMode.RP9'"):
        analysis.reconstruct_activations(codes, "ActMode.RP9")


class Mode(str, enum.Enum):  # noqa: UP042  (a StrEnum has another text)
    """As Vllm_mi_patch has it."""

    RP8, TOPK8 = "rp8", "topk8"


def test_names_can_be_had_where_mi_patch_has_them() -> None:
    from vllm_weir.analysis import load as module

    assert all(getattr(module, name) is getattr(analysis, name) for name in module.__all__)
    assert {"ActivationLoader", "quick_load", "compare_tokens", "reconstruct_activations"} < set(module.__all__)


@pytest.mark.parametrize("tensors", [False, True])
def test_scales_per_dimension_of_several_rows(tensors: bool, tmp_path: Path) -> None:
    """What Vllm_mi_patch's function gives for all rows at once; of each row alone it keeps nothing."""
    rows = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    data = {k: v.T if k == "q" else v for k, v in codes_of(rows.T).items()}
    assert data["scale"].shape == data["zero"].shape == (5,)
    given = {k: torch.from_numpy(v.copy()) for k, v in data.items()} if tensors else data
    for mode in (None, "full8", "ActMode.RP8"):
        got = analysis.reconstruct_activations(given, mode)
        assert isinstance(got, torch.Tensor) == tensors
        assert (np.abs(np.asarray(got) - rows) <= data["scale"] * 0.51).all()
    np.savez(tmp_path / "seq0_layer1_rank0.npz", **data)
    np.testing.assert_array_equal(load(tmp_path).rows(("resid_post", 1)).rows.numpy(), np.asarray(got))
    square = codes_of(rows[:5])  # as many rows as values: a scale a row, as its files have it
    assert (np.abs(analysis.reconstruct_activations(square) - rows[:5]) <= square["scale"][:, None] * 0.51).all()


@pytest.mark.parametrize("content", [b"PK\3\4", b"", None])
def test_a_damaged_file_of_mi_patch_spoils_no_other(content: bytes | None, tmp_path: Path) -> None:
    rows = write_request(tmp_path / "req_1", (0, 1))
    write_request(tmp_path / "req_2", (0,))
    bad = tmp_path / "req_1" / "seq0_layer1_rank0.npz"
    np.savez(bad, q=rows) if content is None else bad.write_bytes(content)
    loader = analysis.ActivationLoader(tmp_path)
    assert loader.list_requests() == ["req_1", "req_2"]
    for request in ("req_1", "req_2"):
        assert list(analysis.load_sequence_activations(tmp_path, request, layers=[0])) == [0]
    assert np.abs(loader.load_request("req_2", True)[0][0] - rows).max() < 0.02
    for call in (
        lambda: loader.load_request("req_1"),
        lambda: analysis.load_sequence_activations(tmp_path, "req_1"),
        lambda: loader.dataset["req_1"]["resid_post", 1],
        lambda: loader.dataset.rows(("resid_post", 1)),
    ):
        with pytest.raises(WeirError, match=r"req_1/seq0_layer1_rank0\.npz"):
            call()


def test_similarity_equals_numpys() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(5, 7)), rng.normal(size=(5, 7))
    flat = a.ravel(), b.ravel()
    cosine = flat[0] @ flat[1] / np.linalg.norm(flat[0]) / np.linalg.norm(flat[1])
    for x, y in ((a, b), (torch.from_numpy(a), torch.from_numpy(b))):
        assert analysis.compute_similarity(x, y) == pytest.approx(cosine)
        assert analysis.compute_similarity(x, y, "l2") == pytest.approx(-np.linalg.norm(a - b))
        assert analysis.compute_similarity(x, y, "correlation") == pytest.approx(np.corrcoef(*flat)[0, 1])
        assert analysis.compare_tokens(x, y, 2, -1, "l2") == pytest.approx(-np.linalg.norm(a[2] - b[-1]))
    np.testing.assert_allclose(analysis.similarity_matrix(a, metric="correlation"), np.corrcoef(a), atol=1e-12)
    assert analysis.compute_similarity(a.astype(np.float16) * 300, a.astype(np.float16) * 300) == pytest.approx(1)
    assert np.isnan(analysis.compute_similarity(a * 0, b))
    for call in (lambda: analysis.compute_similarity(a, b[:3]), lambda: analysis.compute_similarity(a, b, "dot"),
                 lambda: analysis.compare_tokens(a, b, 5), lambda: analysis.compare_tokens(a[0], b)):  # fmt: skip
        with pytest.raises(WeirError):
            call()


def test_statistics_equal_numpys() -> None:
    found = analysis.compute_layer_statistics(STORY)
    x = STORY[3]
    assert found[3] == pytest.approx(
        {"mean": x.mean(), "std": x.std(), "min": x.min(), "max": x.max(), "norm": np.linalg.norm(x),
         "row_norm": np.linalg.norm(x, axis=1).mean()}
    )  # fmt: skip
    shuffled = {0: {"activations": STORY[0][[2, 0, 1, 3]], "positions": np.array([2, 0, 1, 3])}}
    np.testing.assert_array_equal(analysis.create_token_timeline(shuffled), STORY[0])
    with pytest.raises(WeirError, match="layer 7 was not stored"):
        analysis.create_token_timeline(STORY, 7)


def test_pictures(tmp_path: Path) -> None:
    make(tmp_path / "ds", "sharded", ["a"])
    acts = load(tmp_path / "ds")["a"]
    n = length_of("a")
    words = ["<b>&", "$x$", "ü" * 30, *["w"] * (n - 3)]
    drawn = [
        *(analysis.plot_heat_map(acts, tmp_path / f"map{s}", tokens=words) for s in (".png", ".html", ".svg")),
        analysis.plot_heat_map(STORY, tmp_path / "signed.png", value=lambda x: x[:, 0] - 8, label="signed"),
        analysis.plot_norms(acts, tmp_path / "norms.svg"),
        analysis.plot_similarity(acts, tmp_path / "tokens.html", layer=3, tokens=words),
        analysis.plot_similarity(acts, tmp_path / "layers.png", metric="l2"),
        analysis.plot_similarity(acts, tmp_path / "array.svg", layer=np.array(3)),
        analysis.plot_timeline(acts, tmp_path / "deep" / "line.html", tokens=words, prompt_tokens=5),
        analysis.plot_timeline(acts, tmp_path / "tensor.png", layers=[torch.tensor(3)]),
    ]
    for path in drawn:
        raw = path.read_bytes()
        assert len(raw) > 3000
        if path.suffix == ".png":
            assert raw.startswith(b"\x89PNG")
        if path.suffix == ".html":
            text = raw.decode()
            # nothing is fetched from anywhere (namespaces are names, not addresses)
            assert not re.findall(r"(?:src|href)=\"(?!#|data:)|url\((?!#)|<script|@import", text)
            assert "<b>&" not in text
    assert analysis.plot_norms(acts, tmp_path / "again.svg").read_bytes() == (tmp_path / "norms.svg").read_bytes()
    again = analysis.plot_heat_map(acts, tmp_path / "again.html", tokens=words)
    assert again.read_bytes() == (tmp_path / "map.html").read_bytes()


def test_pictures_refuse_what_they_cannot_show(tmp_path: Path) -> None:
    for call, field in [
        (lambda: analysis.plot_norms(STORY, tmp_path / "x.bmp"), "path"),
        (lambda: analysis.plot_norms({0: STORY[0], 1: STORY[3][:2]}, tmp_path / "x.png"), "activations"),
        (lambda: analysis.plot_norms({0: STORY[0] * np.nan}, tmp_path / "x.png"), "activations"),
        (lambda: analysis.plot_norms({}, tmp_path / "x.png"), "activations"),
        (lambda: analysis.plot_heat_map(STORY, tmp_path / "x.png", tokens=["a"]), "tokens"),
        (lambda: analysis.plot_heat_map(STORY, tmp_path / "x.png", value=lambda x: x), "value"),
        (lambda: analysis.plot_similarity(STORY, tmp_path / "x.png", layer=9), "layer"),
        (lambda: analysis.plot_timeline(STORY, tmp_path / "x.png", layers=[9]), "layers"),
        (lambda: analysis.plot_timeline(STORY, tmp_path / "x.png", layers=[]), "layers"),
        (lambda: analysis.plot_timeline(STORY, tmp_path / "x.png", value=np.mean), "value"),
    ]:
        with refused(field):
            call()
    (tmp_path / "file").write_text("")
    with pytest.raises(WeirError, match="cannot write"):
        analysis.plot_norms(STORY, tmp_path / "file" / "x.png")
    with pytest.raises(WeirError, match="is no JSON"):
        analysis.load_activation_manifest(tmp_path / "file")
    (tmp_path / "list").write_text(json.dumps([1]))
    with pytest.raises(WeirError, match="is no manifest"):
        analysis.load_activation_manifest(tmp_path / "list")


def test_rows_of_rp8_are_projected_whatever_else_the_dataset_holds(tmp_path: Path) -> None:
    for name, compress in (("a", "rp8"), ("b", "full8")):
        with open_writer(tmp_path, "sharded", compress=compress) as writer:
            writer.write(Batch(name, "resid_post", 0, [0, 1], [0, 0], torch.randn(2, 128)))
            writer.finish_request(name)
    assert analysis.quick_load(tmp_path, "a").shape == (2, 64)
    assert analysis.quick_load(tmp_path, "b").shape == (2, 128)


def test_a_constant_row_correlates_with_nothing() -> None:
    """The mean of three times 0.1 is not quite 0.1."""
    constant, other = np.full(3, 0.1), np.array([1.0, 2.0, 3.0])
    assert math.isnan(analysis.compute_similarity(constant, other, "correlation"))
    assert math.isnan(analysis.compute_similarity(constant, constant, "correlation"))
    assert np.isnan(analysis.similarity_matrix(np.stack([constant, other]), metric="correlation")).tolist() == [
        [True, True], [True, False],
    ]  # fmt: skip


@needs(module("matplotlib"))
def test_pictures_are_none_of_pyplots(tmp_path: Path) -> None:
    """Without a path they are figures, which a notebook shows; a user's backend and figures stay as they are."""
    from matplotlib import pyplot

    before, backend = pyplot.get_fignums(), pyplot.get_backend()
    for figure in (
        analysis.plot_heat_map(STORY), analysis.plot_norms(STORY), analysis.plot_similarity(STORY),
        analysis.plot_timeline(STORY), analysis.plot_attention(np.full((4, 1, 4), 0.25)),
        analysis.plot_top_neurons(np.eye(3)),
    ):  # fmt: skip
        assert isinstance(figure, pyplot.Figure) and figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(WeirError, match=r"\.png, \.svg or \.html"):
        analysis.plot_norms({0: np.ones((2, 3))}, tmp_path / "norms.jpg")
    with refused("hooks", "plot_norms calls it hook"):
        analysis.plot_norms(STORY, hooks="q")  # type: ignore[call-arg]
    assert (pyplot.get_fignums(), pyplot.get_backend()) == (before, backend)


def test_one_row_and_a_vector_are_one_vector_each() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=7), rng.normal(size=7)
    for metric in ("cosine", "l2", "correlation"):
        wanted = analysis.compute_similarity(a, b, metric)
        for x, y in ((a[None], b), (a, b[None]), (torch.from_numpy(a)[None], b), (a[None, None], b[None])):
            assert analysis.compute_similarity(x, y, metric) == wanted
    for x, y in ((a[None], b[:1]), (np.stack([a, b]), a), (a, np.float64(1)), (np.zeros((1, 0)), np.zeros(0))):
        with pytest.raises(WeirError, match="two arrays of the same shape"):
            analysis.compute_similarity(x, y)


def test_what_was_not_compressed_is_mode_none(tmp_path: Path) -> None:
    """As its manifest says, whose mode callers hand on."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = torch.randn(3, D).to(dtype)
        path = tmp_path / str(dtype)
        with open_writer(path, "npz") as writer:
            writer.write(Batch("a", "resid_post", 0, [0, 1, 2], [5, 6, 7], rows))
            writer.finish_request("a")
        mode = analysis.load_activation_manifest(path / "req_a" / "manifest.json")["mode"]
        assert mode == "none"
        stored = analysis.load_activation_file(path / "req_a" / "seq0_layer0_rank0.npz")
        loaded = analysis.load_sequence_activations(path, "a")[0]
        for made in (
            analysis.reconstruct_activations(stored, mode),
            analysis.reconstruct_activations(loaded, mode),
            analysis.reconstruct_activations({"activations": rows.float().numpy()}, mode),
            analysis.quick_load(path, mode=mode),
        ):
            assert made.dtype == np.float32
            np.testing.assert_array_equal(made, rows.float().numpy())
        assert analysis.compute_layer_statistics({0: stored}) == analysis.compute_layer_statistics({0: rows})
    codes = {"q": np.zeros((2, 3), np.uint8), "scale": np.ones(2), "zero": np.ones(2)}
    with pytest.raises(WeirError, match="these are not the fields of none"):
        analysis.reconstruct_activations(codes, "none")
    with pytest.raises(WeirError, match=r"unknown mode 'rp9'; choose from none, rp8, full8, topk8"):
        analysis.reconstruct_activations(codes, "rp9")
