"""GGUF to bytes and back. Damaged files are in `tests/unit/server/routes/test_admin.py`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from vllm_weir.errors import WeirError
from vllm_weir.schema.gguf import read_gguf, write_gguf

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ARRAYS = npst.arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32, allow_nan=False))


@given(
    metadata=st.dictionaries(NAMES, NAMES | st.integers(0, 2**32 - 1), max_size=4),
    tensors=st.dictionaries(NAMES, ARRAYS, max_size=4),
)
def test_what_is_written_is_read(metadata, tensors):
    metadata = {"general.architecture": "x", **{k: v for k, v in metadata.items() if not k.startswith("general.")}}
    file = read_gguf(write_gguf(metadata, tensors), "file", b"x")
    expected = {k.encode(): v.encode() if isinstance(v, str) else v for k, v in metadata.items()}
    assert file.metadata == expected and list(file.tensors) == list(tensors)
    assert all(file.tensors[name].tobytes() == array.tobytes() for name, array in tensors.items())


def test_tensors_begin_at_multiples_of_32_bytes():
    tensors = {"a": np.ones(3, np.float32), "b": np.full(5, 2, np.float32)}
    data = write_gguf({"general.architecture": "x"}, tensors)
    assert len(data) % 32 == 0 and data[-64:-52] == tensors["a"].tobytes() and data[-32:-12] == tensors["b"].tobytes()


def test_a_file_that_is_cut():
    data = write_gguf({"general.architecture": "x"}, {"a": np.ones(16, np.float32)})
    for end in range(len(data)):
        with pytest.raises(WeirError, match=r"truncated|does not begin"):
            read_gguf(data[:end], "file", b"x")
