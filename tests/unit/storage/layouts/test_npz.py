"""The layout `npz`: what numpy finds in its files, and what its manifests refuse."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_weir import analysis
from vllm_weir.codec import decode, encode, project
from vllm_weir.errors import StoreError, WeirError
from vllm_weir.schema.compression import Compression
from vllm_weir.storage import Batch, atomic_file, load, open_writer
from vllm_weir.storage.layouts.npz import read_npz, write_npz

SITE = ("resid_post", 3)
D = 40
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def rows_with_everything(dtype: torch.dtype) -> torch.Tensor:
    """Rows [6, 40] with zeros of both signs, infinities, NaN and the smallest and largest numbers."""
    rows = torch.randn(6, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    limits = torch.finfo(dtype)
    rows[2, :7] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, limits.smallest_normal / 2, limits.max])
    return rows


def write(path: Path, compress: object, rows: torch.Tensor) -> Path:
    with open_writer(path, "npz", compress=compress) as writer:
        writer.write(Batch("a", *SITE, np.arange(len(rows)), np.arange(len(rows)) + 7, rows))
        writer.finish_request("a")
    return path / "req_a" / "seq0_layer3_rank0.npz"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOATS)
def test_uncompressed_rows_are_what_numpy_finds(dtype: torch.dtype, tmp_path: Path) -> None:
    rows = rows_with_everything(dtype)
    file = write(tmp_path, None, rows)
    with np.load(file, allow_pickle=False) as data:
        stored = data["activations"]
    assert stored.dtype == (np.float16 if dtype == torch.float16 else np.float32)
    np.testing.assert_array_equal(stored, rows.to(torch.float32).numpy().astype(stored.dtype))
    assert same_bits(load(tmp_path)["a"][SITE], rows)
    assert load(tmp_path).header["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("compress", ["none", "fp16", "fp8", "full8", {"method": "rp8", "k": 32}, "topk8"])
def test_every_method_comes_back_exactly(compress: object, dtype: torch.dtype, tmp_path: Path) -> None:
    compression = Compression.parse({"method": "topk8", "k": 16} if compress == "topk8" else compress)
    rows = torch.randn(6, D, generator=torch.Generator().manual_seed(1)).to(dtype)
    header = compression.header(D, str(dtype).removeprefix("torch."))
    records = encode(rows, compression)
    decoded = decode(records, header)
    file = write(tmp_path, compression, rows)
    kept = load(tmp_path)["a"][SITE]
    assert same_bits(kept, rows if compression.method == "none" else decoded)
    wanted = project(records, header) if compression.method == "rp8" else decoded
    stored = analysis.load_activation_file(file)
    names = {"none": "activations", "fp16": "activations", "fp8": "codes", "topk8": "values"}
    array = stored[names.get(compression.method, "q")]
    assert array.dtype == np.uint8 or compression.method in ("none", "fp16")
    for tensors in (False, True):
        made = analysis.reconstruct_activations(analysis.load_activation_file(file, return_torch=tensors))
        assert same_bits(torch.as_tensor(made), wanted)
    loader = analysis.ActivationLoader(tmp_path)
    assert same_bits(torch.from_numpy(loader.load_request("a", reconstruct=True)[0][3]), wanted)
    assert compression.method in ("none", "fp16") or "weir" in loader.load_request("a")[0][3]


def as_before(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the first version stored: the bits of bfloat16, and the codes of fp8 as activations."""
    if "codes" in arrays:
        return {"activations" if name == "codes" else name: array for name, array in arrays.items()}
    return arrays | {"activations": (arrays["activations"].view("<u4") >> 16).astype("<u2")}


@pytest.mark.parametrize("compress", [None, "fp8"])
def test_files_of_earlier_versions_are_read(compress: str | None, tmp_path: Path) -> None:
    file = write(tmp_path, compress, torch.randn(6, D).bfloat16())
    kept, made = load(tmp_path)["a"][SITE], analysis.reconstruct_activations(analysis.load_activation_file(file))
    file.write_bytes(write_npz(as_before(analysis.load_activation_file(file))))
    assert same_bits(load(tmp_path)["a"][SITE], kept)
    np.testing.assert_array_equal(analysis.reconstruct_activations(analysis.load_activation_file(file)), made)
    np.testing.assert_array_equal(analysis.quick_load(tmp_path, layer=3), made)


def test_values_that_are_no_bfloat16_are_not_rounded(tmp_path: Path) -> None:
    file = write(tmp_path, None, torch.randn(6, D).bfloat16())
    dataset = load(tmp_path)
    arrays = read_npz(dataset.index.blocks[0].store, "req_a/seq0_layer3_rank0.npz")
    arrays["activations"][4, 2] = 0.1
    file.write_bytes(write_npz(arrays))
    with pytest.raises(WeirError, match=r"seq0_layer3_rank0\.npz: damaged: .* values that are no bfloat16"):
        load(tmp_path)["a"][SITE]


def edited(manifest: Path, old: str, new: str, *, crc: bool) -> None:
    """Replace a text; without `crc`, in what an earlier version would have written."""
    content = json.loads(manifest.read_text().replace(old, new))
    if not crc:
        content.pop("weir_crc", None)
    manifest.write_text(json.dumps(content, indent=1))


@pytest.mark.parametrize(
    "named",
    ["../req_b/seq0_layer3_rank0.npz", "/etc/seq0_layer3_rank0.npz", "./seq0_layer3_rank0.npz", "x.npz", 7, None],
)
@pytest.mark.parametrize("crc", [False, True])
def test_a_manifest_names_its_own_files_only(named: object, crc: bool, tmp_path: Path) -> None:
    write(tmp_path, "full8", torch.randn(6, D))
    manifest = tmp_path / "req_a" / "manifest.json"
    edited(manifest, '"seq0_layer3_rank0.npz",', f"{json.dumps(named)},", crc=crc)
    what = "damaged or edited" if crc else f"damaged: it names {str(named)!r} for "
    for url in (tmp_path, tmp_path / "req_a"):
        with pytest.raises(WeirError, match=rf"req_a/manifest\.json: {what}|^{manifest}: {what}"):
            load(url)


def test_a_manifest_that_was_edited_or_cut_off_is_damaged(tmp_path: Path) -> None:
    write(tmp_path, "full8", torch.randn(6, D))
    manifest = tmp_path / "req_a" / "manifest.json"
    good = manifest.read_text()
    for old, new in (
        ('"request_id": "a"', '"request_id": "b"'),
        ('"metadata": {}', '"metadata": {"prompt_tokens": 3}'),
    ):
        assert old in good
        manifest.write_text(good.replace(old, new))
        with pytest.raises(WeirError, match=rf"^{manifest}: damaged or edited: its checksum does not match$"):
            load(tmp_path)
    for text in (good[:-30], good[: len(good) // 2], "", "[]", "7", '"x"', "[" * 100_000, good.replace("{}", "[1]")):
        manifest.write_text(text)
        with pytest.raises(WeirError, match=f"^{manifest}: damaged"):
            load(tmp_path)
    manifest.write_text(good)
    (tmp_path / "req_a" / "seq0_layer3_rank0.npz").unlink()
    with pytest.raises(WeirError, match=r"seq0_layer3_rank0\.npz: is missing, although the manifest names it"):
        load(tmp_path)


def test_manifests_of_earlier_versions_are_read(tmp_path: Path) -> None:
    rows = torch.randn(6, D)
    write(tmp_path, None, rows)
    edited(tmp_path / "req_a" / "manifest.json", "", "", crc=False)
    assert same_bits(load(tmp_path)["a"][SITE], rows)


@pytest.mark.parametrize("compress", [None, "fp8", "full8", {"method": "topk8", "k": 8}, {"method": "rp8", "k": 32}])
def test_the_manifest_says_as_mi_patchs_what_there_is(compress: object, tmp_path: Path) -> None:
    """Shapes are as wide as the model's rows, but for rp8."""
    write(tmp_path, compress, torch.randn(6, D))
    manifest = analysis.load_activation_manifest(tmp_path / "req_a" / "manifest.json")
    sequence = manifest["sequences"]["0"]
    assert manifest["request_id"] == "a" and sequence["total_len"] == 6 and list(sequence["layers"]) == ["3"]
    assert sequence["layers"]["3"]["shape"] == [6, 32 if Compression.parse(compress).method == "rp8" else D]


@pytest.mark.parametrize("fits", range(4))
def test_a_request_that_the_disk_has_no_room_for_leaves_no_folder(
    fits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vllm_mi_patch's loader would take the folder for a request."""
    plain, files = atomic_file._write_all, 0

    def full(fd: int, data: memoryview, offset: int) -> None:
        nonlocal files
        files += 1
        if files > fits:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(fd, data, offset)

    with open_writer(tmp_path, "npz") as writer:
        for name in "ab":
            for hook, layer in (("resid_post", 3), ("resid_post", 4), ("resid_mid", 3)):
                writer.write(Batch(name, hook, layer, [0, 1], [5, 6], torch.randn(2, D)))
        writer.finish_request("a")
        monkeypatch.setattr(atomic_file, "_write_all", full)
        with pytest.raises(StoreError, match="No space left"):
            writer.finish_request("b")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["req_a", "weir.json"]
        monkeypatch.setattr(atomic_file, "_write_all", plain)
        assert list(writer.failed) == ["b"]
    with open_writer(tmp_path, "npz") as writer:
        writer.write(Batch("b", "resid_post", 3, [0, 1], [5, 6], torch.randn(2, D)))
        writer.finish_request("b")
    assert load(tmp_path).requests == ["a", "b"]
