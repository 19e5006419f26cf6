"""Files that Weir writes: what `load_vector` reads from them equals what was saved, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from tests.support.properties import examples
from tests.unit.refusals import refused
from vllm_weir.errors import StoreError, WeirError
from vllm_weir.experiments.directions import Directions
from vllm_weir.experiments.vectors.load import load_vector
from vllm_weir.schema.gguf import read_gguf
from vllm_weir.schema.vector_files import read_vectors

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
NUMBERS = st.floats(-1e30, 1e30, allow_nan=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(st.none() | st.booleans() | st.integers() | NUMBERS | TEXT, lambda x: st.lists(x, max_size=3))


@st.composite
def directions(draw, hooks):
    layers = draw(st.lists(st.integers(0, 200), min_size=1, max_size=5, unique=True))
    width = draw(st.integers(1, 40))
    by_layer = st.none() | st.dictionaries(st.sampled_from(layers), NUMBERS)
    return Directions(
        draw(st.sampled_from(hooks)),
        vectors={layer: draw(npst.arrays(np.float32, width, elements=FLOATS)) for layer in layers},
        method=draw(TEXT),
        convention=draw(TEXT),
        auc_by_layer=draw(by_layer),
        bias=draw(by_layer),
        details=draw(st.dictionaries(TEXT, JSON, max_size=3)),
    )


def bits(found: Directions) -> dict[int, bytes]:
    return {layer: vector.tobytes() for layer, vector in found.vectors.items()}


@pytest.mark.filterwarnings("ignore:llama.cpp and repeng")
@pytest.mark.parametrize(
    ("kind", "hooks"),
    [("gguf", ("resid_post",)), ("safetensors", ("resid_post", "resid_pre", "mlp_out", "z", "mlp_post"))],
)
@examples(60)
@given(data=st.data())
def test_what_is_saved_is_read(tmp_path_factory, kind, hooks, data):
    saved = data.draw(directions(hooks))
    path = tmp_path_factory.mktemp("v") / f"v.{kind}"
    saved.save(path)
    found = load_vector(path)
    assert found == saved and bits(found) == bits(saved)


def test_a_control_vector_has_what_llama_cpp_asks_for(tmp_path):
    saved = Directions(vectors={2: [1.0, 2.0], 5: [3.0, 4.0]}, details={"model_type": "qwen3"})
    saved.save(tmp_path / "v.gguf")
    file = read_gguf((tmp_path / "v.gguf").read_bytes(), "file")
    assert file.metadata[b"general.architecture"] == b"controlvector"
    assert file.metadata[b"controlvector.model_hint"] == b"qwen3"
    assert file.metadata[b"controlvector.layer_count"] == 2
    assert {name: array.dtype for name, array in file.tensors.items()} == dict.fromkeys(
        ("direction.2", "direction.5"), np.dtype("<f4")
    )
    saved.save(tmp_path / "v.gguf", model_hint="llama")
    assert read_gguf((tmp_path / "v.gguf").read_bytes(), "file").metadata[b"controlvector.model_hint"] == b"llama"


def test_block_0_is_in_the_metadata_of_a_control_vector(tmp_path):
    saved = Directions(vectors={0: [1.0, 2.0], 5: [3.0, 4.0]})
    with pytest.warns(UserWarning, match="direction of block 0"):
        saved.save(tmp_path / "v.gguf")
    data = (tmp_path / "v.gguf").read_bytes()
    assert list(read_gguf(data, "file").tensors) == ["direction.5"]
    assert load_vector(tmp_path / "v.gguf") == saved
    assert sorted(read_vectors(data, "gguf", "vector")) == [0, 5]


def test_a_server_reads_what_is_saved(tmp_path):
    saved = Directions(vectors={2: [1.0, 2.0], 5: [3.0, 4.0]})
    for kind in ("safetensors", "gguf"):
        saved.save(tmp_path / f"v.{kind}")
        read = read_vectors((tmp_path / f"v.{kind}").read_bytes(), kind, "vector")
        assert {layer: vector.array.tolist() for layer, vector in read.items()} == {2: [1, 2], 5: [3, 4]}


def test_a_server_refuses_directions_of_another_hook_point(tmp_path):
    Directions("mlp_out", vectors={2: [1.0, 2.0]}).save(tmp_path / "v.safetensors")
    with pytest.raises(WeirError, match="directions of mlp_out"):
        read_vectors((tmp_path / "v.safetensors").read_bytes(), "safetensors", "vector")


def test_what_cannot_be_saved(tmp_path):
    saved = Directions("mlp_out", vectors={2: [1.0, 2.0]})
    for path, message in (("v.gguf", "not mlp_out"), ("v.bin", "ends in .gguf or .safetensors")):
        with pytest.raises(WeirError, match=message):
            saved.save(tmp_path / path)
    with pytest.raises(StoreError):
        saved.save(tmp_path / "no" / "v.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_description_that_is_damaged(tmp_path):
    from safetensors.numpy import save_file

    for text, field in (
        ("[]", "file.weir_directions"),
        ('{"more": 1}', "file.weir_directions"),
        ('{"bias": {"x": 1}}', "file.weir_directions.bias.x"),
        ("{", "file.weir_directions"),
    ):
        save_file({"direction.1": np.float32([1])}, tmp_path / "v", {"weir_directions": text})
        with refused(field):
            load_vector(tmp_path / "v")
