"""Rows that are encoded whole inside a tap: in a worker's runtime, in the model's dtype, and where it is refused."""

from __future__ import annotations

import pytest
import torch

import vllm_weir as weir
from tests.support.sae_reference import weights
from tests.unit.worker.scoring.bench import Asked, Bench, D, blocks
from vllm_weir.sae import transfer
from vllm_weir.schema.instructions import ResolvedIntervention
from vllm_weir.schema.set_activation import SetActivation

KEY, LAYER, K = "it#1", 1, 3
SAE = weir.SAE.from_tensors("topk", ("resid_post", LAYER), k=K, **weights("topk", 5, D, 12))
IDS = [3, 1, 4, 1, 5, 2]


@pytest.fixture
def path(tmp_path):
    transfer.write(SAE, tmp_path / "sae.safetensors")
    return str(tmp_path / "sae.safetensors")


def asking(*features, positions="all"):
    """A request that sets features to 2, one after the other."""
    moves, vectors = [], {}
    for feature in features:
        u = SAE.decoder_direction(feature)
        one = SetActivation(u, u, LAYER, "resid_post", value=2.0, sae=KEY, feature=feature, positions=positions)
        lowered = one.lower((D,), lambda *_: pytest.fail("no vector is named"))
        moves.append(ResolvedIntervention("resid_post", (LAYER,), one.positions, 0, lowered.instructions))
        vectors |= lowered.rows
    return Asked(tuple(moves), (), (), vectors)


def expected(rows, features, at):
    """What leaves the last block, in float32 but for what the autoencoder is given."""
    first, second, *others = blocks()
    h = second(first(rows))
    for feature in features:
        seen = h.to(rows.dtype).float()
        a = SAE.encode(seen)[:, feature]
        edited = h.float() + (2.0 - a)[:, None] * torch.from_numpy(SAE.decoder_direction(feature))
        h = torch.where(torch.tensor(at)[:, None], edited, h.float())
    h = h.to(rows.dtype)
    for block in others:
        h = block(h)
    return h


def rows_of(n, dtype, seed=0):
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_requests_and_features(path, dtype):
    bench = Bench(dtype)
    try:
        bench.runtime.saes.load(KEY, path)
        features = {"a": (4,), "b": (7, 4, 7)}
        batch = {name: (0, rows_of(len(IDS), dtype, k)) for k, name in enumerate(features)}
        for name, its in features.items():
            bench.join(name, asking(*its), IDS)
        bench.step(batch, dict.fromkeys(batch, IDS))
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        for name, its in features.items():
            got = torch.stack([bench.got[name].rows[k] for k in range(len(IDS))])
            wanted = expected(batch[name][1], its, [True] * len(IDS))
            assert (got.float() - wanted.float()).abs().max() <= bound * wanted.float().abs().max(), name
            assert not bench.got[name].failures
    finally:
        bench.close()


def test_programs_that_only_the_device_knows(path):
    """Generated tokens are selected by their id."""
    bench = Bench()
    try:
        bench.runtime.saes.load(KEY, path)
        bench.join("a", asking(4, positions={"token_ids": [1, 2]}), IDS[:2])
        batch = rows_of(len(IDS), torch.float32)
        bench.step({"a": (0, batch[:2])}, {"a": IDS})
        for k in range(2, len(IDS)):
            bench.step({"a": (k, batch[k : k + 1])}, {"a": IDS})
        wanted = expected(batch, [4], [one in (1, 2) for one in IDS])
        got = torch.stack([bench.got["a"].rows[k] for k in range(len(IDS))])
        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    finally:
        bench.close()


def test_an_autoencoder_that_is_gone(path):
    """It is kept for a request that joins again after a preemption, and not found by another one."""
    bench = Bench()
    try:
        bench.runtime.saes.load(KEY, path)
        bench.join("a", asking(4), IDS)
        batch = rows_of(len(IDS), torch.float32)
        bench.step({"a": (0, batch[:3])}, {"a": IDS})
        bench.runtime.saes.unload(KEY)
        bench.join("a", asking(4), IDS)
        bench.join("b", asking(4), IDS)
        bench.step({"a": (0, batch), "b": (0, batch)}, {"a": IDS, "b": IDS})
        assert not bench.got["a"].failures
        (reason,) = bench.got["b"].failures
        assert "unloaded while the request waited" in reason
        wanted = expected(batch, [4], [True] * len(IDS))
        got = torch.stack([bench.got["a"].rows[k] for k in range(len(IDS))])
        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        bench.runtime.requests.follow([], ["a", "b"])
        assert bench.runtime.usage()["sae_bytes"] == 0 and not bench.runtime.table.encoded
    finally:
        bench.close()


def test_an_engine_whose_only_graphs_have_the_taps(path):
    bench = Bench()
    try:
        bench.runtime.saes.load(KEY, path)
        bench.runtime.switch.pin()
        bench.join("a", asking(4), IDS)
        batch = rows_of(len(IDS), torch.float32)
        bench.step({"a": (0, batch)}, {"a": IDS})
        (reason,) = bench.got["a"].failures
        assert "one set of CUDA graphs" in reason and "enforce_eager" in reason
    finally:
        bench.close()
