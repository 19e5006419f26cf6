"""The checkpoint: what was written is read back, whatever a kill left behind, and nothing else is taken for one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.refusals import refused
from vllm_weir.errors import WeirError
from vllm_weir.experiments.sweep.result import Checkpoint, decode, decode_value, encode_header, encode_value

PLAN, KEYS = "ab" * 32, 500
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
VALUES = st.dictionaries(st.integers(0, KEYS - 1), FLOATS, max_size=12)


def same(a: float, b: float) -> bool:
    return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (math.isnan(a) and math.isnan(b))


def written(values: dict[int, float]) -> bytes:
    return encode_header(PLAN, KEYS) + b"".join(encode_value(k, v) for k, v in values.items())


@given(st.integers(0, 2**63), FLOATS)
def test_a_line_to_the_bit(key: int, value: float) -> None:
    found = decode_value(encode_value(key, value).removesuffix(b"\n"))
    assert found is not None and found[0] == key and same(found[1], value)


@given(VALUES, st.data())
def test_cut_anywhere(values: dict[int, float], data: st.DataObject) -> None:
    """After a kill at any byte, all whole lines are there, and the file ends after the last of them."""
    whole = written(values)
    cut = data.draw(st.integers(0, len(whole)))
    found, end = decode(whole[:cut], PLAN, KEYS)
    lines = whole[:cut].count(b"\n")
    assert end == (whole[:cut].rfind(b"\n") + 1) and list(found) == list(values)[: max(0, lines - 1)]
    assert all(same(found[key], values[key]) for key in found)


@given(VALUES.filter(len), st.data())
def test_any_changed_byte_is_noticed(values: dict[int, float], data: st.DataObject) -> None:
    whole = written(values)
    start = len(encode_header(PLAN, KEYS))
    at = data.draw(st.integers(start, len(whole) - 2))
    changed = bytearray(whole)
    changed[at] ^= data.draw(st.sampled_from([1, 2, 4, 8, 16, 32]))
    try:
        found, _ = decode(bytes(changed), PLAN, KEYS)
    except WeirError as error:
        assert error.field == "checkpoint"
    else:
        raise AssertionError(f"taken for {found}")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"hello\n", "no checkpoint"),
        (b"hello", "no checkpoint"),
        (b'{"format": "weir sweep", "version": 2}\n', "another version"),
        (encode_header("cd" * 32, KEYS), "another sweep"),
        (encode_header(PLAN, KEYS) + encode_value(KEYS, 1.0), "unknown or was there"),
        (encode_header(PLAN, KEYS) + 2 * encode_value(3, 1.0), "unknown or was there"),
        (encode_header(PLAN, KEYS) + b"3 0x1p+0 00000000\n" + encode_value(4, 1.0), "line 2 is damaged"),
        (b"[1]\n", "no checkpoint"),
    ],
)
def test_refused(tmp_path: Path, data: bytes, says: str) -> None:
    file = tmp_path / "cells"
    file.write_bytes(data)
    with pytest.raises(WeirError, match=says) as error:
        Checkpoint(file, PLAN, KEYS)
    assert error.value.field == "checkpoint" and file.read_bytes() == data


def test_a_file_is_continued(tmp_path: Path) -> None:
    file = tmp_path / "cells"
    with Checkpoint(file, PLAN, KEYS) as one:
        one.add(7, 0.1)
        with pytest.raises(AssertionError, match="twice"):
            one.add(7, 0.2)
        with pytest.raises(WeirError, match="another process"):
            Checkpoint(file, PLAN, KEYS)
    file.write_bytes(file.read_bytes() + encode_value(8, 1.0)[:-5])
    with Checkpoint(file, PLAN, KEYS) as two:
        assert two.values == {7: 0.1}
        two.add(9, -2.0)
    assert file.read_bytes() == written({7: 0.1, 9: -2.0})


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "cells", tmp_path, "a\0b"):
        with refused("checkpoint", "cannot open"):
            Checkpoint(path, PLAN, KEYS)
