"""Files of lenses: every published form is read, damage and other models are refused, and no code runs."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch

from tests.unit.refusals import refused
from vllm_weir.lenses.files import open_lens
from vllm_weir.lenses.fitted import FittedLens

D, LAYERS = 4, 4
generator = torch.Generator().manual_seed(0)
J = {layer: torch.randn(D, D, generator=generator).half() for layer in range(LAYERS - 1)}
SUMS = {layer: 8 * matrix.float() for layer, matrix in J.items()}
LISTED = {"source_layers": [0, 1, 2], "d_model": D}
FORMS = {
    "jlens": {"J": J, "n_prompts": 8} | LISTED,
    "vllm-lens": {"J": J, "provenance": {"n_prompts": 8, "skip_first": 16}} | LISTED,
    "transformer-lens": {"J": J, "n_prompts": 8, "metadata": {"model_name": "m", "target_layer": 3}} | LISTED,
    "checkpoint": {"jacobian_sum": SUMS, "n_done": 8, "next_idx": 8, "target_layer": 3, "skip_first": 16,
                   "source_layers": [0, 1, 2]},
    "j++": {"parameters": {"jacobians": J}, "source_layers": [0, 1, 2],
            "config": {"lens_type": "j", "d_model": D, "num_prompts_trained_on": 8,
                       "relative_end_transport_layer": -1}},
}  # fmt: skip


def saved(tmp_path, state, name="lens.pt"):
    torch.save(state, tmp_path / name)
    return tmp_path / name


@pytest.mark.parametrize("form", FORMS)
def test_published_forms(tmp_path, form):
    lens = open_lens(saved(tmp_path, FORMS[form]))
    lens.check_fits(LAYERS, D, "path")
    assert (lens.kind, lens.layers, lens.d_model, lens.n_prompts) == ("jacobian", (0, 1, 2), D, 8)
    for layer, matrix in J.items():
        assert torch.equal(lens.translator(layer).matrix.float(), matrix.float())
    rows = torch.randn(3, D, generator=generator)
    assert torch.allclose(lens.translator(1)(rows), torch.einsum("ij,nj->ni", J[1].float(), rows))


def test_npz(tmp_path):
    arrays = {f"J_{layer}": matrix.numpy() for layer, matrix in J.items()}
    np.savez(tmp_path / "lens.npz", n_prompts=8, d_model=D, **arrays)
    lens = open_lens(tmp_path / "lens.npz")
    assert (lens.layers, lens.n_prompts) == ((0, 1, 2), 8)
    assert torch.equal(lens.translator(2).matrix, J[2])


def test_some_blocks_are_enough_and_others_are_refused(tmp_path):
    lens = open_lens(saved(tmp_path, {"J": {1: J[1]}}))
    lens.check_fits(LAYERS, D, "path")
    with refused("layers", "no matrix for block 2; it has those from 1 to 1"):
        lens.translator(2)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"weights": J}, "none of the keys J, jacobian_sum and parameters.jacobians"),
        ([1, 2], "holds a list"),
        ({"J": {}}, "no matrix"),
        ({"J": {"a": J[0]}}, "not by its number"),
        ({"J": J | {0: torch.zeros(D, D + 1)}}, "J of block 0 is"),
        ({"J": J | {0: torch.zeros(D, D, dtype=torch.int64)}}, "J of block 0 is"),
        ({"J": J, "d_model": D + 1}, "J of block 0 is"),
        ({"J": J, "source_layers": [0, 1]}, "source_layers are not"),
        ({"jacobian_sum": SUMS}, "does not say of how many prompts"),
        ({"J": J, "d_model": D, "d_source": 4 * D}, "several rows wide"),
        ({"J": J, "provenance": {"stream_reduce": "mean"}}, "several rows wide"),
        ({"parameters": {"jacobians": J}, "config": {"relative_end_transport_layer": -2}}, "another block"),
    ],
)
def test_what_is_no_such_lens_is_refused(tmp_path, state, says):
    with refused("lens.path", says):
        open_lens(saved(tmp_path, state), "lens.path")


def test_lenses_of_other_models_are_refused(tmp_path):
    lens = open_lens(saved(tmp_path, FORMS["jlens"]))
    with refused("path", "at least 4 blocks of width 4, and the model has 3 of width 4"):
        lens.check_fits(3, D, "path")
    with refused("path", "the model has 4 of width 8"):
        lens.check_fits(LAYERS, 8, "path")
    early = open_lens(saved(tmp_path, {"J": {0: J[0]}, "target_layer": 2}, "early.pt"))
    with refused("path", "what leaves block 2, not the last one"):
        early.check_fits(LAYERS, D, "path")


def test_numbers_that_are_not_finite_are_refused_where_they_are_read(tmp_path):
    lens = open_lens(saved(tmp_path, {"J": J | {1: torch.full((D, D), float("nan"))}}))
    assert lens.translator(0).matrix.isfinite().all()
    with refused("path", "block 1 that are not finite"):
        lens.translator(1)


def test_damage_and_code_are_refused(tmp_path):
    with refused("path", "has no lens"):
        open_lens(tmp_path / "gone.pt")
    (tmp_path / "text.pt").write_text("hello there, this is no lens at all")
    with refused("path", "damaged"):
        open_lens(tmp_path / "text.pt")
    with refused("path", "damaged, or to be read by running code"):
        open_lens(saved(tmp_path, {"J": J, "model": torch.nn.Linear(2, 2)}, "code.pt"))
    (tmp_path / "no.npz").write_bytes(b"PK")
    with refused("path", "damaged, or no npz"):
        open_lens(tmp_path / "no.npz")
    np.savez(tmp_path / "other.npz", a=np.zeros(2))
    with refused("path", "no arrays J_0"):
        open_lens(tmp_path / "other.npz")


def tuned(folder, **change):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"d_model": D, "num_hidden_layers": LAYERS}))
    state = {f"{k}.weight": torch.full((D, D), float(k)) for k in range(LAYERS)}
    state |= {f"{k}.bias": torch.full((D,), -float(k)) for k in range(LAYERS)}
    torch.save(state | change, folder / "params.pt")
    return folder


def test_a_tuned_lens_reads_what_enters_the_next_block(tmp_path):
    lens = open_lens(tuned(tmp_path / "t"))
    assert (lens.kind, lens.layers, lens.num_layers) == ("tuned", (0, 1, 2), LAYERS)
    matrix, bias = lens.translator(0)
    assert torch.equal(matrix, torch.full((D, D), 1.0) + torch.eye(D)) and torch.equal(bias, torch.full((D,), -1.0))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"0.weight": 3}, "the weight of block 0 is int"),
        ({"1.weight": torch.zeros(D, D + 1)}, "the weight of block 1 is"),
        ({"9.weight": torch.zeros(D, D)}, "one weight and one bias for each block"),
        ({"1.bias": torch.full((D,), float("nan"))}, "not finite"),
    ],
)
def test_damaged_tuned_lenses_are_refused(tmp_path, change, says):
    with refused("path", says):
        open_lens(tuned(tmp_path / "t", **change)).translator(0)


def test_a_file_that_is_written_again_is_read_again(tmp_path):
    path = saved(tmp_path, {"J": {0: J[0]}})
    first, before = open_lens(path), path.stat()
    assert open_lens(path) is first
    saved(tmp_path, {"J": {0: J[1]}})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))  # even within a clock's tick
    assert torch.equal(open_lens(path).translator(0).matrix, J[1])


def test_a_direction_is_the_transpose_times_the_token_s_row(tmp_path):
    unembedding = torch.randn(7, D, generator=generator)
    lens = FittedLens(open_lens(saved(tmp_path, FORMS["jlens"])), LAYERS, lambda token: unembedding[token])
    expected = torch.einsum("ij,i->j", J[1].float(), unembedding[5])
    assert torch.allclose(lens.direction(5, 1), expected)
    assert torch.equal(lens.direction(5, 3), unembedding[5])
    assert repr(lens).startswith("FittedLens(jacobian, 3 blocks, d_model=4")
    with refused("token_id", "an int from 0"):
        lens.direction("a", 1)
    with refused("layers", "no matrix for block 9"):
        lens.direction(5, 9)
    with refused("lens", "has no engine"):
        FittedLens(tmp_path / "lens.pt").direction(5, 1)
