"""Requests for which the device has no memory: they fail, hold nothing, and leave like any other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.sae_reference import weights
from tests.unit.worker.scoring.bench import Asked, Bench, D, Draw
from vllm_weir.sae import transfer
from vllm_weir.sae.autoencoder import SAE
from vllm_weir.schema.compression import Compression
from vllm_weir.schema.engine_spec import EngineSpec
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import CONST, Instruction, ResolvedIntervention
from vllm_weir.schema.positions import MAX_LIST, Positions
from vllm_weir.schema.read_outs import FEATURES, ReadOut
from vllm_weir.schema.request import Postprocess, ResolvedSpec, SiteRequest
from vllm_weir.schema.vectors import digest_of
from vllm_weir.worker.transfer import directions
from vllm_weir.worker.transfer.codecs import Codecs

KEY, SITE, IDS = "it#1", Site("resid_post", 1), [3, 1, 4]
VECTOR = np.ones(D, np.float32)
DIGEST = digest_of(VECTOR)
POSTPROCESSES = {
    "directions": Postprocess(None, directions=(DIGEST,)),
    "compression": Postprocess(None, compression=Compression.parse({"method": "rp8", "k": 32})),
    "read-outs": Postprocess(
        None, read_outs=(ReadOut(FEATURES, SITE, KEY, 4), ReadOut(FEATURES, SITE, KEY, 0, (2, 1)))
    ),
    "steering": Postprocess(None, directions=(DIGEST,)),
}


class Capturing(Asked):
    """A request that captures, and adds a vector at the same block."""

    postprocess: Postprocess

    @property
    def spec(self):
        capture = SiteRequest(SITE, Positions.parse("all"), False)
        return EngineSpec(ResolvedSpec((capture,), self.postprocess), self.moves)


def asking(postprocess):
    instruction = Instruction(CONST, DIGEST, a=1.0)
    move = ResolvedIntervention("resid_post", (1,), Positions.parse("all"), 0, (instruction,))
    asked = Capturing((move,), (), (), {DIGEST: VECTOR})
    asked.postprocess = postprocess
    return asked


def no_memory(*_args, **_kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.fixture
def bench(tmp_path, monkeypatch):
    bench = Bench()
    monkeypatch.setattr(bench.runtime.parts.buffer_server, "maps", lambda endpoint: True)
    sae = SAE.from_tensors("standard", SITE, **weights("standard", 1, D, 12))
    transfer.write(sae, tmp_path / "sae.safetensors")
    bench.runtime.parts.saes.load(KEY, str(tmp_path / "sae.safetensors"))
    yield bench
    bench.close()


def held(bench):
    """What is held on the device, once the autoencoder is unloaded."""
    bench.runtime.parts.saes.unload(KEY)
    codecs = bench.runtime.parts.codecs._compressions._codecs
    return {name: n for name, n in bench.runtime.usage().items() if n} | dict(codecs)


@pytest.mark.parametrize("what", POSTPROCESSES)
def test_a_request_for_which_the_device_has_no_memory(bench, monkeypatch, what):
    """It alone fails, at once nothing of it is held, and it may leave and come again."""
    requests, planner = bench.runtime.requests, bench.runtime.parts.planner
    bench.join("a", asking(POSTPROCESSES[what]), IDS)
    new = list(bench._new)
    with monkeypatch.context() as full:
        owner, name = {
            "directions": (directions, "upload"),
            "compression": (Codecs, "_make"),
            "read-outs": (torch, "tensor"),
            "steering": (planner, "add_steering"),
        }[what]
        full.setattr(owner, name, no_memory)
        requests.follow(new, [])
    (reason,) = bench.got["a"].failures
    assert "the device has no memory left" in reason and "gpu_memory_utilization" in reason
    assert "CUDA" not in reason
    bench.runtime.begin_step((["a"], [0]))
    assert bench.runtime.parts.switch.live, "as on the ranks that could serve it"
    saes = dict(bench.runtime.parts.saes)
    assert held(bench) == {}
    bench.runtime.parts.saes._saes.update(saes)

    bench._new.clear()
    bench.join("b", Draw(0).request(), IDS)
    rows = torch.zeros(3, D)
    bench.step({"a": (0, rows), "b": (0, rows)}, {"a": IDS, "b": IDS})
    assert not bench.got["b"].failures and len(bench.got["b"].rows) == 3

    requests.follow([], ["a", "b"])
    bench.runtime.begin_step(([], []))
    assert not bench.runtime.parts.switch.live
    requests.follow(new, [])
    assert bench.got["a"].failures == [reason] and planner.capturing.keys() == planner.steered.keys() == {"a"}
    requests.follow([], ["a"])
    left = held(bench)
    assert left == {} or (what == "compression" and len(left) == 1), "an idle codec is kept ready"


def test_a_request_that_fails_after_a_part_of_it_has_joined(bench, monkeypatch):
    """Whatever the reason is."""

    def refuse(*_args):
        raise ValueError("no such vector")

    monkeypatch.setattr(bench.runtime.parts.planner, "add_steering", refuse)
    bench.join("a", asking(POSTPROCESSES["read-outs"]), IDS)
    bench.runtime.requests.follow(bench._new, [])
    (reason,) = bench.got["a"].failures
    assert reason.endswith("no such vector") and held(bench) == {}


def test_a_kernel_is_not_blamed_for_a_full_device():
    class Full:
        compression = Compression.parse("full8")
        check_kernel = staticmethod(no_memory)

    with pytest.raises(torch.OutOfMemoryError):
        Codecs(D, torch.device("cpu"))._check_kernel(Full())


def test_what_cannot_be_read_fails_its_own_request(bench):
    class Unread(Capturing):
        @property
        def spec(self):
            capture = SiteRequest(SITE, Positions("list", tuple(range(MAX_LIST + 1))), False)
            return EngineSpec(ResolvedSpec((capture,), self.postprocess), self.moves)

    unread = Unread((), (), (), {})
    unread.postprocess = Postprocess(None)
    bench.join("a", unread, IDS)
    bench.join("b", Draw(0).request(), IDS)
    rows = torch.zeros(3, D)
    bench.step({"a": (0, rows), "b": (0, rows)}, {"a": IDS, "b": IDS})
    (reason,) = bench.got["a"].failures
    assert "could not read the request" in reason and str(MAX_LIST) in reason
    assert not bench.got["b"].failures and len(bench.got["b"].rows) == 3
    bench.runtime.requests.follow([], ["a", "b"])
    assert held(bench) == {}


@pytest.mark.parametrize("where", ["tap.device_tables", "scoring.scorer"])
def test_a_step_for_which_the_device_has_no_memory_fails_its_requests(bench, monkeypatch, where):
    """And what had to be written then is written before the next step."""
    instruction = Instruction(CONST, DIGEST, a=1.0)
    move = ResolvedIntervention("resid_post", (1,), Positions.parse("all"), 0, (instruction,))
    asked, rows = Asked((move,), (), (), {DIGEST: VECTOR}), torch.zeros(len(IDS), D)
    bench.join("a", asked, IDS)
    moves = bench.runtime.parts.scorer._table.moves
    if where == "scoring.scorer":
        moves.append(np.arange(1))
    with monkeypatch.context() as full:
        full.setattr(f"vllm_weir.worker.{where}.upload", no_memory)
        plain = bench.step({"a": (0, rows)}, {"a": IDS})
    (reason,) = bench.got["a"].failures
    assert "the device has no memory left" in reason
    bench.leave("a")
    bench.join("b", asked, IDS)
    steered = bench.step({"b": (0, rows)}, {"b": IDS})
    assert not bench.got["b"].failures and not moves
    assert (steered - plain).abs().amax(1).min() > 0, "the vector is on the device"
