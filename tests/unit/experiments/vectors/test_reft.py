"""Folders of pyreft: its formulas, as its source has them, against what is made of the files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tests.unit.refusals import refused
from vllm_weir.errors import WeirError
from vllm_weir.experiments.vectors.load import load_vector
from vllm_weir.experiments.vectors.reft import load_reft

D, R, LAYERS = 12, 3, (1, 4)


class Rotation(torch.nn.Module):
    """``pyreft.interventions.LowRankRotateLayer``."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.nn.init.orthogonal_(torch.empty(D, R)))


class Parts(torch.nn.Module):
    """The parts of one of pyreft's interventions, under its names, with its formulas."""

    def __init__(self, kind, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.kind = kind
        if kind in ("Noreft", "Nodireft"):
            self.proj_layer = torch.nn.Linear(D, R, bias=seed % 2 == 0)
        else:
            self.rotate_layer = torch.nn.utils.parametrizations.orthogonal(Rotation())
            with torch.no_grad():  # as training leaves it: not where it began
                self.rotate_layer.parametrizations.weight.original.add_(0.1 * torch.randn(D, R))
        if kind in ("Consreft", "Lobireft"):
            self.learned_source = torch.nn.Parameter(torch.rand(R))
        else:
            self.learned_source = torch.nn.Linear(D, R)

    @torch.no_grad()
    def forward(self, h):
        source = self.learned_source(h) if isinstance(self.learned_source, torch.nn.Linear) else self.learned_source
        if self.kind == "Noreft":
            return h + (source - self.proj_layer(h)) @ self.proj_layer.weight
        if self.kind == "Nodireft":
            return h + source @ self.proj_layer.weight
        turned = h @ self.rotate_layer.weight
        if self.kind in ("Loreft", "Consreft"):
            source = source - turned
        return h + source @ self.rotate_layer.weight.T

    def saved(self):
        if self.kind != "Loreft":
            return self.state_dict()
        return {**self.learned_source.state_dict(), "rotate_layer": self.rotate_layer.weight.data}


def folder(path, kinds, component="block_output", key="layer.{layer}.comp.{component}.unit.pos.nunit.1#0", **config):
    """Write a folder as pyvene does, interventions of these kinds at `LAYERS`; return them."""
    path.mkdir(exist_ok=True)
    made = [Parts(kind, i) for i, kind in enumerate(kinds)]
    for layer, parts in zip(LAYERS, made):
        torch.save(parts.saved(), path / f"intkey_{key.format(layer=layer, component=component)}.bin")
    about = {
        "intervention_types": [f"<class 'pyreft.interventions.{kind}Intervention'>" for kind in kinds],
        "representations": [[layer, component, "pos", 1, R, None, None] for layer, _ in zip(LAYERS, made)],
        **config,
    }
    (path / "config.json").write_text(json.dumps(about))
    return made


@pytest.mark.parametrize("kind", ["Loreft", "Noreft", "Consreft", "Direft", "Nodireft"])
def test_low_rank_interventions_are_functions_that_low_rank_has(tmp_path, kind):
    made = folder(tmp_path / "v", [kind] * 2)
    h = torch.randn(50, D)
    for parts, found in zip(made, load_reft(tmp_path / "v", positions="last_prompt"), strict=True):
        W, rotation, b = (torch.from_numpy(getattr(found, name).array.copy()) for name in ("W", "R", "b"))
        ours = h + (h @ W.T + b - h @ rotation.T) @ rotation
        assert (ours - parts(h)).abs().max() <= 1e-5
        assert found.hook == "resid_post" and found.positions.kind == "last_prompt"
    assert [found.layers for found in load_reft(tmp_path / "v")] == [(layer,) for layer in LAYERS]


def test_lobireft_adds_a_vector(tmp_path):
    made = folder(tmp_path / "v", ["Lobireft"] * 2)
    found = load_vector(tmp_path / "v")
    h = torch.randn(50, D)
    assert found.layers == LAYERS and "adds R^T b" in found.convention
    for layer, parts in zip(LAYERS, made):
        assert (h + found.vector(layer) - parts(h)).abs().max() <= 1e-5
    with pytest.raises(WeirError, match=r"read it with weir\.load_vector"):
        load_reft(tmp_path / "v")


def test_the_order_is_that_of_the_configuration(tmp_path):
    """Files are in the order of their names, classes in that of the representations."""
    folder(tmp_path / "v", ["Loreft", "Direft"])
    config = json.loads((tmp_path / "v" / "config.json").read_text())
    config = {name: values[::-1] for name, values in config.items()}
    (tmp_path / "v" / "config.json").write_text(json.dumps(config))
    assert [found.layers for found in load_reft(tmp_path / "v")] == [(4,), (1,)]


def test_interventions_at_one_place_need_positions_of_their_own(tmp_path):
    """pyreft's f1+l1 with unshared weights: one is trained at the first positions, one at the last."""
    path, key = tmp_path / "v", "layer.{layer}.comp.block_output.unit.pos.nunit.1#{n}"
    folder(path, ["Loreft"] * 2, representations=[[1, "block_output", "pos", 1]] * 2)
    for n, layer in enumerate(LAYERS):
        old = path / f"intkey_layer.{layer}.comp.block_output.unit.pos.nunit.1#0.bin"
        old.rename(path / f"intkey_{key.format(layer=1, n=n)}.bin")
    for positions in ("all", [0, 3]):
        with refused("positions", r"nunit\.1#0\.bin and .*nunit\.1#1\.bin"):
            load_reft(path, positions)
    with pytest.raises(WeirError, match="3 selectors for 2 interventions"):
        load_reft(path, ["all", "prompt", "generated"])
    found = load_reft(path, [[0], "last_prompt"])
    assert [one.layers for one in found] == [(1,), (1,)]
    assert [one.positions.kind for one in found] == ["list", "last_prompt"]


def test_what_is_no_path():
    with refused("path"):
        load_reft(3)


@pytest.mark.parametrize(
    "component, key, hook, layers",
    [
        ("block_output", "layer_{layer}_comp_{component}_unit_pos_nunit_1#0", "resid_post", LAYERS),
        ("block_input", "layer.{layer}.comp.{component}.unit.pos.nunit.1#0", "resid_pre", LAYERS),
        ("mlp_output", "layer.{layer}.repr.{component}.unit.pos.nunit.1#0", "mlp_out", LAYERS),
        ("attention_output", "layer.{layer}.comp.{component}.unit.pos.nunit.1#0", "attn_out", LAYERS),
        ("model.layers[7].output", "comp.{component}.unit.pos.nunit.1#0", "resid_post", (7,)),  # a module
    ],
)
def test_components_are_hook_points(tmp_path, component, key, hook, layers):
    folder(tmp_path / "v", ["Loreft"] * len(layers), component, key)
    assert [(found.hook, found.layers) for found in load_reft(tmp_path / "v")] == [(hook, (one,)) for one in layers]


@pytest.mark.parametrize(
    "change, field",
    [
        ({"intervention_types": ["<class 'pyvene.RotatedSpaceIntervention'>"] * 2}, "config.json.intervention_types"),
        ({"intervention_types": []}, "config.json.intervention_types"),
        ({"representations": []}, "config.json.representations"),
        ({"representations": [[9, "block_output", "pos", 1]] * 2}, "config.json.representations[0]"),
        ({"representations": [1, 2]}, "config.json.representations[0]"),
    ],
)
def test_a_configuration_that_does_not_fit(tmp_path, change, field):
    folder(tmp_path / "v", ["Loreft"] * 2, **change)
    with refused(field):
        load_reft(tmp_path / "v")


def test_what_is_not_one_vector_is_refused(tmp_path):
    folder(tmp_path / "v", ["Loreft"] * 2)
    with pytest.raises(WeirError, match=r"not by one vector; read it with weir\.load_reft"):
        load_vector(tmp_path / "v")
    (file, *_) = (tmp_path / "v").glob("intkey_*")
    with pytest.raises(WeirError, match="give the folder"):
        load_vector(file)
    folder(tmp_path / "w", ["Loreft"] * 2, "query_output")
    with pytest.raises(WeirError, match="'query_output' is not supported"):
        load_reft(tmp_path / "w")


def test_tensors_that_do_not_fit(tmp_path):
    folder(tmp_path / "v", ["Loreft"] * 2)
    file = tmp_path / "v" / "intkey_layer.1.comp.block_output.unit.pos.nunit.1#0.bin"
    good = torch.load(file)
    for change, field in (
        ({"weight": torch.zeros(R, D - 1)}, file.name),
        ({"bias": torch.zeros(R + 1)}, file.name),
        ({"bias": torch.zeros(R, 1)}, f"{file.name}.bias"),
        ({"rotate_layer": torch.full((D, R), np.nan)}, f"{file.name}.rotate_layer"),
        ({"weight": None}, f"{file.name}.weight"),
    ):
        torch.save({name: value for name, value in {**good, **change}.items() if value is not None}, file)
        with refused(field):
            load_reft(tmp_path / "v")
