"""What is remembered: bounded, never confused, never stale."""

from __future__ import annotations

import copy
import json
import pickle

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vllm_weir as weir
from tests.unit.frontends import frontend_of
from tests.unit.request_strategies import served
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.cache import admission_key
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.patches.sampling_params import clone
from vllm_weir.schema import vectors
from vllm_weir.schema.request import RequestSpec, WireForm
from vllm_weir.schema.vectors import Vector, vector_of
from vllm_weir.util.lru import LruCache


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=60))
def test_the_last_used_are_kept_within_bounds(steps):
    memo, model = LruCache(20, max_entry_bytes=8), {}
    for key, size, put in steps:
        if put:
            memo.put(key, (key, size), size)
            if size <= 8:
                model.pop(key, None)
                model[key] = size
                while sum(model.values()) > 20:
                    del model[next(iter(model))]
        else:
            found = memo.get(key)
            assert found == ((key, model[key]) if key in model else None)
            if key in model:
                model[key] = model.pop(key)
        assert len(memo) == len(model) and memo.size == sum(model.values()) <= 20
    memo.clear()
    assert len(memo) == memo.size == 0


values = st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=6)


@given(values)
def test_a_vector_that_this_process_wrote_down_is_read_back_as_it_is(numbers):
    vector = Vector.parse(numbers, "v")
    wire = vector.to_json()
    assert Vector.parse(wire, "v") is vector and Vector.parse(copy.deepcopy(wire), "v") is vector
    far = json.loads(json.dumps(wire))
    again = Vector.parse(far, "v")
    assert again is not vector and np.array_equal(again.array, vector.array) and again.digest == vector.digest
    assert vector_of(far["b64"]) is None and vector_of(wire["b64"]) is vector


def test_a_remembered_text_under_another_form_is_read_anew():
    wire = Vector.parse([[1.0, 2.0], [3.0, 4.0]], "v").to_json()
    assert Vector.parse(wire | {"shape": [4]}, "v").array.tolist() == [1, 2, 3, 4]
    assert Vector.parse(wire | {"dtype": "float16", "shape": [8]}, "v").array.shape == (8,)
    for wrong in ({"shape": [5]}, {"dtype": "int8"}, {"more": 1}):
        with pytest.raises(WeirError):
            Vector.parse(wire | wrong, "v")
    with pytest.raises(WeirError, match="dimensions"):
        Vector.parse(wire, "v", (1,))


def test_texts_of_vectors_are_bounded(monkeypatch):
    monkeypatch.setattr(vectors, "_texts", LruCache(100_000))
    made = [Vector.parse(np.full(1000, float(k)), "v") for k in range(40)]
    wires = [v.to_json() for v in made]
    assert vectors._texts.size <= 100_000 and 1 < len(vectors._texts) < 40
    for vector, wire in zip(made, wires, strict=True):
        assert np.array_equal(Vector.parse(wire, "v").array, vector.array)


@given(st.text("ABab01+/=-_ \n\ud800", max_size=12))
def test_base64_is_what_the_standard_library_takes_it_for(text):
    import base64
    import binascii

    try:
        expected = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        with pytest.raises((binascii.Error, ValueError)):
            vectors._base64_bytes(text)
    else:
        assert vectors._base64_bytes(text) == expected


def test_copies_of_a_wire_form():
    """vLLM copies params deeply, and so may the caller; nobody's change is another's."""
    spec = RequestSpec((weir.Capture(positions=[1, 2]),), (weir.Add(np.ones(4), [0], 2.0),))
    wire = spec.to_json()
    assert isinstance(wire, WireForm)
    pickled = pickle.loads(pickle.dumps(wire))  # noqa: S301
    for copied in (copy.deepcopy(wire), copy.copy(wire), pickled, json.loads(json.dumps(wire))):
        assert type(copied) is dict and copied == wire and RequestSpec.parse(copied).to_json() == wire
    deep = copy.deepcopy(wire)
    deep["capture"][0]["positions"].append(3)
    deep["interventions"][0]["scale"] = 5.0
    assert wire["capture"][0]["positions"] == [1, 2] and wire["interventions"][0]["scale"] == 2.0
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(wire)) == wire
    wire["capture"].append(wire)
    assert copy.deepcopy(wire)["capture"][1]["capture"][1]["v"] == 1, "it may even hold itself"


def test_the_quick_copy_of_params_is_vllms_copy():
    """The same values, and nothing that the two share can be changed in either."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    def original(params):
        return copy.deepcopy(params)

    quick = clone(original, None)
    base = SamplingParams(
        n=2, stop=["a", "b"], stop_token_ids=[5], bad_words=["x"], logit_bias={3: 1.0}, seed=7, max_tokens=9,
        structured_outputs=StructuredOutputsParams(regex="a+"), extra_args={"other": {"kept": [1, 2]}},
    )  # fmt: skip
    params = weir.params(base, capture=weir.Capture(positions=[1, 2]), interventions=weir.Add(np.ones(4), [0], 2.0))
    made = quick(params)
    assert made == original(params) and made is not params and type(made) is SamplingParams
    for name in params.__struct_fields__:
        if isinstance(value := getattr(params, name), list | dict | set):
            assert getattr(made, name) is not value, name
    assert made.structured_outputs is not params.structured_outputs
    made.extra_args["other"]["kept"].append(3)
    made.extra_args["weir"]["capture"][0]["positions"].append(3)
    made._all_stop_token_ids.add(77)
    assert params.extra_args["other"] == {"kept": [1, 2]} and 77 not in params._all_stop_token_ids
    assert params.extra_args["weir"]["capture"][0]["positions"] == [1, 2]
    params.extra_args["weir"]["capture"].append(params.extra_args)
    assert len(quick(params).extra_args["weir"]["capture"]) == 2, "it may even hold itself"
    params.skip_clone = True
    shallow = clone(lambda self: "vLLM's", None)
    assert shallow(params) == shallow(base) == "vLLM's"


def test_wishes_with_vectors_are_told_apart_by_content():
    def key(vector, layers=1, far=False):
        wire = RequestSpec((), (weir.Add(vector, layers),)).to_json()
        return admission_key({"weir": json.loads(json.dumps(wire)) if far else copy.deepcopy(wire)}, True).key

    one, other = np.ones(2000), np.ones(2000)
    other[7] = 1.5
    assert key(one) == key(one.copy()) != key(other) and key(one) != key(one, 2)
    assert key(one, far=True) == key(one.copy(), far=True) != key(other, far=True)
    assert len(key(one)[2]) < 500, "the digest stands for the text"
    own = RequestSpec((), (weir.Add(one, 1),)).to_json()
    assert admission_key({"weir": own}, True).size > 4 * len(one), "what is remembered holds the vector"


def test_wishes_that_hold_arrays_are_not_taken_for_one_another():
    """The same bytes are other numbers in another dtype, and another order of them in another shape."""
    numbers = np.arange(4, dtype=np.float32)
    for odd in (numbers, numbers.view(np.int32), [numbers], {"b64": memoryview(numbers)}, bytearray(4), np.float32(1)):
        for weir_object in (
            {"interventions": [{"op": "add", "vector": odd}]},
            {"capture": {"project": odd}},
            {"modules": odd},
        ):
            found = admission_key({"weir": {"v": 1, **weir_object}}, True)
            assert found is None or not found.cacheable, "it is remembered"
    plain = {
        "v": 1,
        "capture": [{"hook": "resid_post", "layers": (1, 2), "positions": {"token_ids": [3]}}],
        "modules": [],
    }
    assert admission_key({"weir": plain}, True).cacheable
    capabilities = EngineCapabilities(served(2), 2, 4, "float32", 1 << 10)
    frontend = frontend_of(capabilities)
    for array in (numbers, numbers.view(np.int32).copy()):
        weir_object = {"v": 1, "interventions": [{"op": "add", "vector": array, "layers": [1]}]}
        (row,) = frontend._admitted({"weir": weir_object}, True).rows.values()
        assert row.tolist() == array.astype(np.float32).tolist()
