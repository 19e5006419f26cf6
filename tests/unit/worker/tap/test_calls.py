"""Rows that are encoded whole inside a tap: in a worker's runtime, in the model's dtype, and where it is refused."""

from __future__ import annotations

import pytest
import torch

import vllm_weir as weir
from tests.support.sae_reference import weights
from tests.unit.worker.scoring.bench import Asked, Bench, D, blocks
from vllm_weir.sae import transfer
from vllm_weir.schema.instructions import ResolvedIntervention
from vllm_weir.schema.set_activation import Reconstruction, SetActivation
from vllm_weir.schema.user_hooks import Hook

KEY, LAYER, K = "it#1", 1, 3
SAE = weir.SAE.from_tensors("topk", ("resid_post", LAYER), k=K, **weights("topk", 5, D, 12))
IDS = [3, 1, 4, 1, 5, 2]
EVERYWHERE = (True,) * len(IDS)
FACTORS = {"a": torch.tensor(2.0), "b": torch.tensor(-3.0)}


@pytest.fixture
def bench(tmp_path, request):
    """With the autoencoder loaded; `request.param`: its dtype."""
    transfer.write(SAE, tmp_path / "sae.safetensors")
    made = Bench(getattr(request, "param", torch.float32))
    made.runtime.parts.saes.load(KEY, str(tmp_path / "sae.safetensors"))
    yield made
    made.close()


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


def rows_of(dtype=torch.float32, seed=0):
    return torch.randn(len(IDS), D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(bench, name, rows, features, at=EVERYWHERE, bound=1e-5):
    got = torch.stack([bench.got[name].rows[k] for k in range(len(IDS))]).float()
    wanted = expected(rows, features, at).float()
    assert (got - wanted).abs().max() <= bound * wanted.abs().max(), name
    assert not bench.got[name].failures


@pytest.mark.parametrize("bench", [torch.float32, torch.bfloat16], indirect=True)
def test_several_requests_and_features(bench):
    dtype, features = bench.runtime.model_info.dtype, {"a": (4,), "b": (7, 4, 7)}
    batch = {name: (0, rows_of(dtype, k)) for k, name in enumerate(features)}
    for name, its in features.items():
        bench.join(name, asking(*its), IDS)
    bench.step(batch, dict.fromkeys(batch, IDS))
    for name, its in features.items():
        check(bench, name, batch[name][1], its, bound=1e-5 if dtype == torch.float32 else 2e-2)


def test_programs_that_only_the_device_knows(bench):
    """Generated tokens are selected by their id."""
    bench.join("a", asking(4, positions={"token_ids": [1, 2]}), IDS[:2])
    batch = rows_of()
    bench.step({"a": (0, batch[:2])}, {"a": IDS})
    for k in range(2, len(IDS)):
        bench.step({"a": (k, batch[k : k + 1])}, {"a": IDS})
    check(bench, "a", batch, [4], [one in (1, 2) for one in IDS])


def test_an_autoencoder_that_is_gone(bench):
    """It is kept for a request that joins again after a preemption, and not found by another one."""
    bench.join("a", asking(4), IDS)
    batch = rows_of()
    bench.step({"a": (0, batch[:3])}, {"a": IDS})
    bench.runtime.parts.saes.unload(KEY)
    bench.join("a", asking(4), IDS)
    bench.join("b", asking(4), IDS)
    bench.step({"a": (0, batch), "b": (0, batch)}, {"a": IDS, "b": IDS})
    (reason,) = bench.got["b"].failures
    assert "unloaded while the request waited" in reason
    check(bench, "a", batch, [4])
    bench.runtime.requests.follow([], ["a", "b"])
    assert bench.runtime.usage()["sae_bytes"] == 0 and not bench.runtime.parts.table.called


def test_an_engine_whose_only_graphs_have_the_taps(bench):
    bench.runtime.parts.switch.activate_always()
    bench.join("a", asking(4), IDS)
    bench.step({"a": (0, rows_of())}, {"a": IDS})
    (reason,) = bench.got["a"].failures
    assert "one set of CUDA graphs" in reason and "enforce_eager" in reason


def changed(rows, change):
    """What leaves the last block if a function changes what leaves `LAYER`."""
    for k, block in enumerate(blocks()):
        rows = change(block(rows)) if k == LAYER else block(rows)
    return rows


def check_changed(bench, name, rows, change):
    got, wanted = torch.stack([bench.got[name].rows[k] for k in range(len(IDS))]), changed(rows, change)
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max(), name
    assert not bench.got[name].failures


def test_rows_are_reconstructed_by_the_autoencoder_of_their_request(bench, tmp_path):
    """Beside a plain request, which comes first and keeps its bits."""
    other = weir.SAE.from_tensors("topk", ("resid_post", LAYER), k=K, **weights("topk", 6, D, 12))
    transfer.write(other, tmp_path / "other.safetensors")
    bench.runtime.parts.saes.load("other#1", str(tmp_path / "other.safetensors"))
    coders, batch = {"a": SAE, "b": other}, {name: (0, rows_of(seed=k)) for k, name in enumerate(("plain", "a", "b"))}
    bench.join("plain", Asked((), (), (), {}), IDS)
    for name, key in (("a", KEY), ("b", "other#1")):
        one = Reconstruction(key, LAYER, "resid_post")
        move = ResolvedIntervention("resid_post", (LAYER,), one.positions, 0, one.lower((D,), None).instructions)
        bench.join(name, Asked((move,), (), (), {}), IDS)
    bench.step(batch, dict.fromkeys(batch, IDS))
    for name, sae in coders.items():
        check_changed(bench, name, batch[name][1], lambda h, sae=sae: sae.decode(sae.encode(h), h))
    plain = torch.stack([bench.got["plain"].rows[k] for k in range(len(IDS))])
    assert torch.equal(plain, changed(batch["plain"][1], lambda h: h))


def _scaled(rows, ctx):
    return rows * ctx.args["by"]


def test_compiled_hooks_of_several_requests_each_get_their_own_args(bench):
    """One call serves both, as neither keeps the step out of a graph."""
    hooks = {name: Hook(_scaled, "resid_post", LAYER, args={"by": by}, mode="compiled") for name, by in FACTORS.items()}
    batch = {name: (0, rows_of(seed=k)) for k, name in enumerate(hooks)}
    for name, hook in hooks.items():
        lowered = hook.lower((D,), None)
        move = ResolvedIntervention("resid_post", (LAYER,), hook.positions, 0, lowered.instructions)
        bench.join(name, Asked((move,), (), (), {}), IDS, calls=lowered.calls)
    bench.step(batch, dict.fromkeys(batch, IDS))
    for name, (_, rows) in batch.items():
        check_changed(bench, name, rows, lambda h, by=FACTORS[name]: h * by)
