"""Short reprs of what a request asks for, and the right word for another package's."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

import vllm_weir as weir
from tests.unit.refusals import refused
from vllm_weir.fitting.methods import METHODS, MethodName
from vllm_weir.schema.hooks import HOOKS, HookPoint
from vllm_weir.schema.intervention_kinds import KINDS, parse_intervention
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.probe_base import ACTIVATIONS, Activation

V, MATRIX = np.ones(256, np.float32), np.ones((4, 256))


def steer(rows: Any, ctx: Any) -> Any:
    return rows


SHORT = {
    "Add(vector[256], layers=[3], scale=2)": weir.Add(V, layers=3, scale=2.0),
    "Add('happy')": weir.Add("happy"),
    "Add({1: vector[256], 3: vector[256]}, hook='mlp_out')": weir.Add({1: V, 3: V}, hook="mlp_out"),
    "Add({0: vector[256], ... 30 more, 31: vector[256]})": weir.Add(dict.fromkeys(range(32), V)),
    "Add(vector[256], layers=[0, 1, 2, 3, 4, 5, 6, 7, ... 24 more])": weir.Add(V, layers=range(32)),
    "Add(vector[2, 256], positions=[4, 5], norm_match=True)": weir.Add(
        np.ones((2, 256)), positions=[4, 5], norm_match=True
    ),
    "Add(vector[256], layers=[1], positions='generated', when=When('mood', above=0.5))": weir.Add(
        V, 1, positions="generated", when=weir.When("mood", above=0.5)
    ),
    "Ablate(directions[64], heads=[1, 2], hook='z')": weir.Ablate(np.ones(64), hook="z", heads=[1, 2]),
    "Clamp(direction[256], layers=[2], value=4, strength=0.5)": weir.Clamp(V, 2, value=4.0, strength=0.5),
    "Replace(values[256], alpha=0.25)": weir.Replace(V, alpha=0.25),
    "LowRank(R[4, 256], W[4, 256], b[4], layers=[1])": weir.LowRank(MATRIX, MATRIX, np.ones(4), 1),
    "SetFeature('demo', 7, value=3)": weir.SetFeature("demo", 7, value=3.0),
    "Features('demo', top_k=5)": weir.Features("demo", top_k=5),
    "Capture()": weir.Capture(),
    "Capture(layers=[3], positions='last_prompt', reduce='mean')": weir.Capture(
        layers=3, positions="last_prompt", reduce="mean"
    ),
    "Capture(layers=[3], project=project[2, 256])": weir.Capture(layers=3, project=np.ones((2, 256))),
    "Probe('mood', weight[256], layer=2)": weir.Probe("mood", V, layer=2),
    "Use('steer', layers=[2])": weir.Use("steer", layers=2),
    "SteeringVector(activations[1, 256], [3], scale=2)": weir.SteeringVector(np.ones((1, 256)), [3], scale=2.0),
    "Positions('1:5')": Positions.parse("1:5"),
    "Positions([0, 1, 2, 3, 4, 5, 6, 7, ... 492 more])": Positions.parse(range(500)),
    "Positions({'token_ids': [0, 1, 2, 3, 4, 5, 6, 7, ... 2 more]})": Positions.parse({"token_ids": list(range(10))}),
}


@pytest.mark.parametrize("short", SHORT)
def test_short(short: str) -> None:
    shown = repr(SHORT[short])
    assert sorted(shown.replace(")", "").split(", ")) == sorted(short.replace(")", "").split(", ")), shown


def test_lenses_and_hooks() -> None:
    assert repr(weir.Lens(layers=[1, 2])).startswith("Lens(") and "layers=[1, 2]" in repr(weir.Lens(layers=[1, 2]))
    assert repr(weir.Hook(steer, layers=2)) == "Hook(steer, layers=[2])"
    assert repr(weir.Hook(steer, args={"w": V, "n": 2.0})) == "Hook(steer, args={'w': array[256], 'n': 2})"


OTHER = [
    (weir.Add, {"vector": V}, "coeff", "scale"), (weir.Add, {"vector": V}, "factor", "scale"),
    (weir.Add, {"vector": V}, "alpha", "scale"), (weir.Add, {"vector": V}, "layer_idx", "layers"),
    (weir.Add, {"vector": V}, "position", "positions"), (weir.Add, {}, "direction", "vector"),
    (weir.Clamp, {"direction": V, "value": 1}, "scale", "strength"), (weir.Clamp, {"value": 1}, "vector", "direction"),
    (weir.Replace, {"values": V}, "strength", "alpha"), (weir.Ablate, {}, "direction", "directions"),
    (weir.SetFeature, {"name": "a", "feature": 1}, "strength", "value, scale or add"),
    (weir.SetFeature, {"name": "a", "value": 1}, "feature_id", "feature"),
    (weir.Probe, {"name": "p", "weight": V}, "layers", "layer"), (weir.Probe, {"name": "p"}, "vector", "weight"),
    (weir.Capture, {}, "layer", "layers"), (weir.Capture, {}, "hook_name", "hook"),
    (weir.SteeringVector, {"activations": V}, "layers", "layer_indices"),
    (weir.Lens, {}, "k", "top_k"), (weir.Hook, {"function": steer}, "layer", "layers"),
    (weir.params, {}, "intervention", "interventions"), (weir.params, {}, "captures", "capture"),
    (weir.fit, {}, "layer", "layers"), (weir.sweep, {}, "hook", "hooks"), (weir.attribute, {}, "head", "heads"),
    (weir.extract, {}, "layer_idx", "layers"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "given", "word", "right"), OTHER)
def test_the_right_word(target: Any, given: dict[str, Any], word: str, right: str) -> None:
    with refused(word, f"{target.__name__} calls it {right}"):
        target(**given, **{word: 1})


def test_the_right_word_in_the_wire_form() -> None:
    with refused("i.layer", "did you mean 'layers'"):
        parse_intervention({"op": "add", "vector": "v", "layer": 3}, "i")
    with refused("i.coeff", "did you mean 'strength'"):
        parse_intervention({"op": "clamp", "direction": "v", "value": 1, "coeff": 3}, "i")
    with refused("capture.layer", "did you mean 'layers'"):
        weir.Capture.from_json({"layer": 3})


def test_words_that_nothing_is_called_are_python_s_to_refuse() -> None:
    with pytest.raises(TypeError, match="colour"):
        weir.Add(V, colour="red")  # type: ignore[call-arg]


def test_types_list_what_there_is() -> None:
    assert set(get_args(get_args(HookPoint)[0])) == set(HOOKS)
    assert list(get_args(MethodName)) == list(METHODS) and list(get_args(Activation)) == list(ACTIVATIONS)
    assert all(kind.__repr__ is KINDS["add"].__repr__ for kind in KINDS.values())
