"""`Replay` and its wire form, what it refuses, and how its experts travel."""

from __future__ import annotations

import base64
import io

import msgspec
import numpy as np
import pytest
import torch

import vllm_weir as weir
from tests.support.forced import random_experts
from vllm_weir.core.cache_keys import CacheKeys
from vllm_weir.errors import WeirError
from vllm_weir.schema.engine_spec import EngineSpec
from vllm_weir.schema.replay import MAX_BYTES, ReplayRows, parse_routing
from vllm_weir.schema.request import RequestSpec, ResolvedSpec
from vllm_weir.schema.routing import ModelRouting

MODEL = ModelRouting.merge([{"routers": {"refused": "", "blocks": [1, 2], "experts": 8, "top_k": 2}}], 3)
ARRAY = random_experts((4, 3, 2), 8, 1, dense=(0,))


def npy(array, **more):
    file = io.BytesIO()
    np.save(file, array, **more)
    return base64.b64encode(file.getvalue()).decode()


def forged(header: str) -> str:
    """An .npy file of ten bytes that says something else of itself."""
    text = header.encode().ljust(117) + b"\n"
    return base64.b64encode(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(10)).decode()


def test_it_travels_as_the_smallest_npy():
    asked = weir.Replay(torch.from_numpy(ARRAY).long(), 5, weights=True, prompt_start=2)
    wire = RequestSpec(routing=asked).to_json()
    assert wire["routing"].keys() == {"weights", "prompt_start", "start", "array"}
    read = RequestSpec.parse(wire).routing
    assert read == asked and hash(read) == hash(asked) and read.array.dtype == np.uint8
    assert np.array_equal(read.array, ARRAY) and (read.start, read.weights, read.prompt_start) == (5, True, 2)
    changed = ARRAY.copy()
    changed[0, 1, 0] += 1
    others = weir.Replay(ARRAY), weir.Replay(changed, 5, weights=True, prompt_start=2), weir.Routing(True, 2)
    assert all(asked != other and other != asked for other in others)
    for text in (npy(ARRAY), npy(np.asfortranarray(ARRAY)), npy(ARRAY.astype(">i8"))):
        assert parse_routing({"array": text}, "routing") == weir.Replay(ARRAY)
    wide = weir.Replay(ARRAY.astype(np.int64) + 300)
    assert wide.array.dtype == np.uint16 and RequestSpec.parse(RequestSpec(routing=wide).to_json()).routing == wide
    assert "array[4, 3, 2]" in repr(asked)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"array": "no base64"}, "routing.array"),
        ({"array": npy(ARRAY)[:40]}, "routing.array"),
        ({"array": npy(ARRAY)[:-8]}, "routing.array"),
        ({"array": npy(ARRAY.astype(np.float32))}, "routing.array"),
        ({"array": npy(np.array([{}] * 8).reshape(2, 2, 2), allow_pickle=True)}, "routing.array"),
        ({"array": forged("{'descr': '<i8', 'fortran_order': False, 'shape': (9999999999, 99, 9)}")}, "routing.array"),
        ({"array": forged("{'descr': '<i8', 'fortran_order': False, 'shape': (-1, 1, 1)}")}, "routing.array"),
        ({"array": forged("__import__('os')")}, "routing.array"),
        ({"array": "A" * (2 * MAX_BYTES)}, "routing.array"),
        ({"array": [[[1, 2]]]}, "routing.array"),
        ({"array": None}, "routing.array"),
        ({"array": ARRAY, "start": -1}, "routing.start"),
        ({"array": ARRAY, "start": 1.5}, "routing.start"),
        ({"array": ARRAY, "weights": 1}, "routing.weights"),
        ({"array": ARRAY, "prompt_start": -1}, "routing.prompt_start"),
        ({"array": ARRAY, "offset": 1}, "routing.offset"),
        ({"start": 1}, "routing.start"),
    ],
)
def test_what_is_refused(given, field):
    with pytest.raises(WeirError) as e:
        parse_routing(given, "routing")
    assert e.value.field == field


@pytest.mark.parametrize(
    "array",
    [
        ARRAY[0],
        ARRAY[:0],
        ARRAY.astype(bool),
        ARRAY.astype(float),
        ARRAY.astype(int) - 9,
        ARRAY.astype(int) + 70000,
        "x",
    ],
)
def test_arrays_of_something_else(array):
    with pytest.raises(WeirError) as e:
        weir.Replay(array)
    assert e.value.field == "routing.array"


def with_row(block, experts):
    array = ARRAY.copy()
    array[2, block] = experts
    return array


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (ARRAY[:, :2], r"expected \[positions, 3 blocks, 2 experts\], got \[4, 2, 2\]"),
        (np.concatenate([ARRAY, ARRAY + 1], -1), "2 experts"),
        (with_row(1, (3, 8)), r"at position 9, block 1, an expert is none of the experts 0\.\.7"),
        (with_row(2, (3, 3)), "at position 9, block 2, an expert occurs twice"),
        (with_row(0, (1, 0)), "at position 9, block 0, an expert is not 0, and the block has no experts"),
    ],
)
def test_what_the_model_cannot_choose(array, says):
    with pytest.raises(WeirError, match=says) as e:
        weir.Replay(array, 7).rows(MODEL)
    assert e.value.field == "routing.array"


def test_rows_are_those_of_their_positions():
    rows = msgspec.convert(msgspec.to_builtins(weir.Replay(ARRAY, 3).rows(MODEL)), ReplayRows)
    assert (rows.start, rows.stop) == (3, 7) and np.array_equal(rows.ids, ARRAY)
    assert rows.until(7) is rows and rows.until(3) is None and rows.until(1) is None
    cut = rows.until(5)
    assert cut is not None and cut.stop == 5 and np.array_equal(cut.ids, ARRAY[:2])
    many = ModelRouting.merge([{"routers": {"refused": "", "blocks": [1, 2], "experts": 300, "top_k": 2}}], 3)
    wide = ARRAY.astype(np.int64)
    wide[:, 1:] += 290
    assert np.array_equal(weir.Replay(wide).rows(many).ids, wide)


def test_cache_keys_tell_apart_what_is_replayed_in_a_block():
    def keys(array=ARRAY, start=0):
        own = CacheKeys((), 8, None, weir.Replay(array, start).rows(MODEL))
        return [own.of_block(first, [0] * 2) for first in (0, 2, 4)]

    first, second, beyond = keys()
    assert first != second and beyond is None and keys() == [first, second, None]
    assert keys(np.concatenate([ARRAY[:2], ARRAY[:2]]))[:2] == [first, first]
    changed = ARRAY.copy()
    changed[3, 2] = changed[3, 2, ::-1]
    assert keys(changed)[0] == first and keys(changed)[1] != second
    shifted = keys(ARRAY, 1)
    assert None not in shifted and not {*shifted} & {first, second}


def test_the_engine_is_told_where_something_is_replayed():
    spec = EngineSpec(ResolvedSpec(()), replayed=(3, 70))
    read = EngineSpec.from_wire(spec.wire)
    assert read == spec and read.end == 70
    assert EngineSpec.from_wire(EngineSpec(ResolvedSpec(())).wire).replayed == ()
