"""Autoencoders on a worker: loaded from a file as they are, bounded, kept while a request holds them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.sae_reference import weights
from vllm_weir.errors import WeirError
from vllm_weir.sae import transfer
from vllm_weir.sae.autoencoder import SAE
from vllm_weir.sae.tensors import for_file
from vllm_weir.schema.hooks import Site
from vllm_weir.worker import saes
from vllm_weir.worker.saes import WorkerSAEs

CPU = torch.device("cpu")
KINDS = [
    ("standard", ("resid_post", 1), {"apply_b_dec_to_input": True}),
    ("gated", ("z", 2), {"head": 3}),
    ("topk", ("attn_out", 1), {"k": 5, "rescale_acts_by_decoder_norm": True}),
    ("batchtopk", ("mlp_post", 0), {"normalize_activations": "layer_norm"}),
    ("jumprelu_skip_transcoder", ("mlp_in", 1), {"out_site": ("mlp_out", 2)}),
]


def make(architecture="standard", site=("resid_post", 1), **options):
    return SAE.from_tensors(architecture, site, **weights(architecture), **options)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "x.safetensors"
    transfer.write(make(), path)
    return str(path)


@pytest.mark.parametrize(("architecture", "site", "options"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_autoencoder_arrives_as_it_was_sent(tmp_path, architecture, site, options, dtype):
    sent = make(architecture, site, name="n", metadata={"model_name": object()}, **options).to(dtype=dtype)
    transfer.write(sent, tmp_path / "x")
    got = transfer.read(tmp_path / "x")
    assert vars(got.config) == vars(sent.config) | {"metadata": {}}
    assert isinstance(got.site, Site) and isinstance(got.out_site, Site)
    assert got.tensors.keys() == sent.tensors.keys() and got.dtype == dtype
    assert all(got.tensors[name].equal(tensor) for name, tensor in sent.tensors.items())


def test_weights_that_share_memory_are_written_and_read(tmp_path):
    """Biases made as one tensor of zeros, and a threshold that is a part of another tensor."""
    one, both = torch.zeros(96), torch.randn(2, 96)
    gated = SAE.from_tensors("gated", ("resid_post", 1), **weights("gated") | {"b_gate": one, "r_mag": one})
    parts = {"b_enc": both[0], "threshold": both.view(-1)[48:144]}
    jumprelu = SAE.from_tensors("jumprelu", ("resid_post", 1), **weights("jumprelu") | parts)
    for i, sae in enumerate((gated, jumprelu)):
        transfer.write(sae, tmp_path / f"{i}.safetensors")
        sae.save(tmp_path / str(i))
        for back in (transfer.read(tmp_path / f"{i}.safetensors"), SAE.load(tmp_path / str(i))):
            assert all(back.tensors[name].equal(tensor) for name, tensor in sae.tensors.items())


def test_weights_mapped_from_a_file_are_not_copied(tmp_path):
    transfer.write(make("gated"), tmp_path / "x")
    mapped = transfer.read(tmp_path / "x").tensors
    assert all(tensor.data_ptr() == mapped[name].data_ptr() for name, tensor in for_file(mapped).items())


def test_files_that_cannot_be_written_or_read(tmp_path):
    for call in (lambda p: transfer.write(make(), p), transfer.read):
        with pytest.raises(WeirError) as e:
            call(tmp_path / "nowhere" / "x")
        assert e.value.field == "sae"
    (tmp_path / "x").write_bytes(b"no safetensors file")
    with pytest.raises(WeirError, match="cannot read"):
        transfer.read(tmp_path / "x")


def test_the_limit_counts_what_requests_still_hold(file):
    size = make().nbytes
    worker = WorkerSAEs(CPU, 2 * size)
    assert worker.load("a", file) == {"bytes": size} == worker.load("a", file)
    with open(file, "r+b") as content:  # what is loaded does not depend on its file
        before = content.read()
        content.seek(0)
        content.write(bytes(4096))
        assert worker["a"].tensors["W_enc"].equal(make().tensors["W_enc"])
        content.seek(0)
        content.write(before)
    assert worker.load("b", file) == {"bytes": 2 * size}
    full = {"error": worker._full(size, f"{2 * size} of the {2 * size} bytes are taken"), "field": "settings.sae_bytes"}
    assert worker.load("c", file) == full
    held = worker.hold("r", "a")
    assert held is worker.hold("r", "a") is worker.hold("s", "a")
    worker.unload("a")
    assert list(worker) == ["b"] and worker.nbytes == 2 * size and worker.load("c", file) == full
    with pytest.raises(WeirError, match="unloaded while the request waited"):
        worker.hold("t", "a")
    worker.release("r")
    assert worker.load("c", file) == full
    worker.release("s")
    worker.release("nobody")
    assert worker.load("c", file) == {"bytes": 2 * size} and sorted(worker) == ["b", "c"]
    worker.unload("b")
    worker.unload("b")
    assert worker.nbytes == size


def test_without_a_limit_it_is_what_the_device_has_free(file, monkeypatch):
    size = make().nbytes
    monkeypatch.setattr(saes, "_free_bytes", lambda device: size + saes.SPARE - 1)
    assert f"the device has {size - 1} bytes free" in WorkerSAEs(CPU).load("a", file)["error"]
    monkeypatch.setattr(saes, "_free_bytes", lambda device: size + saes.SPARE)
    assert WorkerSAEs(CPU).load("a", file) == {"bytes": size}


def test_memory_that_holds_cached_files_is_free(monkeypatch):
    meminfo = "MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable: 4096 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda path: meminfo)
    assert saes._free_bytes(CPU) == 4096 << 10


def test_a_full_device_and_a_missing_file_are_answers(tmp_path, file, monkeypatch):
    worker = WorkerSAEs(CPU, 1 << 30)
    assert worker.load("a", str(tmp_path / "nowhere"))["field"] == "sae"

    move = torch.Tensor.to

    def full(tensor, *args, **kwargs):
        if kwargs.get("copy"):
            raise torch.OutOfMemoryError
        return move(tensor, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "to", full)
        answer = worker.load("a", file)
    assert "the device is full" in answer["error"]
    assert len(worker) == 0 and worker.nbytes == 0


def test_who_joins_again_finds_what_was_unloaded_meanwhile(file):
    worker = WorkerSAEs(CPU)
    worker.load("a", file)
    held = worker.hold("r", "a")
    worker.unload("a")
    assert worker.hold("r", "a") is held
    worker.release("r")
    with pytest.raises(WeirError, match="unloaded while the request waited"):
        worker.hold("r", "a")
