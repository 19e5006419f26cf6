"""How the rows of a request are looked up."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from vllm_weir import Activations, Site, WeirError

RESID_POST = "blocks.3.hook_resid_post resid_post.3 resid_post[3] post_block.3"


@pytest.fixture
def acts():
    sites = [Site("embed", 0), Site("resid_post", 3), Site("final_norm", 0)]
    ids = torch.arange(6).reshape(3, 2)
    return Activations({s: torch.zeros(2, 4) for s in sites}, dict(zip(sites, ids)), dict(zip(sites, 10 + ids)))


@pytest.mark.parametrize(
    ("first", "keys"),
    [
        (0, [("embed",), ("embed", 0), ("embed.0",)]),
        (2, [("resid_post", 3), *((key,) for key in (Site("resid_post", 3), *str.split(RESID_POST)))]),
        (4, [("final_norm[0]",), ("final_norm",)]),
    ],
)
def test_positions_and_tokens_are_asked_for_as_rows_are(acts, keys, first):
    for key in keys:
        rows = acts[key if len(key) == 2 else key[0]]
        assert rows.shape == (2, 4)
        assert acts.positions_of(*key).tolist() == [first, first + 1]
        assert acts.token_ids_of(*key).tolist() == [10 + first, 11 + first]


def test_numpy_arrays(acts):
    """bfloat16, which numpy lacks, to the bit as float32; the others as they are, in the tensor's own memory."""
    values = torch.tensor([[1.0, -0.0, 3.3895313892515355e38], [float("inf"), 1e-40, 1 / 3]])
    site = Site("resid_post", 3)
    for dtype, expected in ((torch.bfloat16, "float32"), (torch.float32, "float32"), (torch.float16, "float16")):
        rows = values.to(dtype)
        acts = Activations({site: rows}, {site: torch.arange(2)}, {site: torch.arange(2)}, lens_layers=(3,))
        for key in (("resid_post", 3), (("resid_post", 3),), ("resid_post.3",), (site,), ("blocks.3.hook_resid_post",)):
            array = acts.numpy(*key)
            assert array.dtype == expected and array.shape == (2, 3)
            assert torch.from_numpy(array).to(dtype).view(torch.uint8).equal(rows.view(torch.uint8))
        assert (array.ctypes.data == rows.data_ptr()) == (dtype != torch.bfloat16)
        assert acts.numpy("residual_stream").shape == (1, 2, 3)
    with pytest.raises(KeyError, match=r"resid_post\[2\] was not captured"):
        acts.numpy("resid_post", 2)


def test_a_site_that_was_not_captured_is_a_key_error(acts):
    with pytest.raises(KeyError, match=r"resid_post\[2\] was not captured"):
        acts.positions_of("resid_post", 2)


@pytest.mark.parametrize(
    "meta",
    [{"sites": "3"}, {"sites": "[3]"}, {"sites": "null"}, {"lens": "1"}, {"sites": "[" * 99_999}, {"lens": "{"}],
)
def test_a_file_with_foreign_metadata_is_an_error_that_names_it(tmp_path, meta):
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.zeros(1)}, path, metadata={"weir": "1", "sites": "[]", "lens": "[]"} | meta)
    with pytest.raises(WeirError, match=r"x\.safetensors"):
        Activations.load(path)
