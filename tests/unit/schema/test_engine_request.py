"""The request as it travels: written by msgpack, which knows no types, or pickled."""

import pickle

import msgspec
import pytest

from vllm_weir.schema.engine_spec import EngineRequest, TableNeeds

WHOLE = EngineRequest(
    spec=b"\x93\x90\xc0\x90",
    reader_endpoint="ipc:///tmp/reader#token",
    first_position=3,
    rows_per_token=8,
    rows_per_tap=2,
    max_row_tokens=None,
    rows_per_group=4,
    last_reduced=9,
    max_tokens=16,
    table_needs=TableNeeds(["a", "b"], 2, 5),
    vectors={"a": b"\x00\x00\x80\x3f"},
    cache_salt="salt",
)


@pytest.mark.parametrize("request_", [WHOLE, EngineRequest(b"", "")])
def test_both_ways_of_travelling_keep_it(request_):
    extra_args = msgspec.msgpack.decode(msgspec.msgpack.encode({"weir": request_, "other": 1}))
    assert isinstance(extra_args["weir"], list)
    arrived = EngineRequest.carried_by(extra_args)
    assert arrived == request_ == pickle.loads(pickle.dumps(request_))  # noqa: S301
    assert EngineRequest.carried_by(extra_args) is arrived is extra_args["weir"], "it is decoded once"


def test_a_plain_request_carries_none():
    assert EngineRequest.carried_by(None) is EngineRequest.carried_by({}) is EngineRequest.carried_by({"a": 1}) is None


def test_a_core_without_weir_refuses_the_request():
    request = EngineRequest(b"", "")
    assert "not loaded" in request.refusal
    request.core_refusal = "vLLM has changed"
    assert request.refusal.endswith("vLLM has changed")
    request.core_refusal = ""
    assert not request.refusal
