"""Controllers in the settings, and gates that name one."""

from __future__ import annotations

import pytest

from tests.unit.refusals import pairs, refused
from vllm_weir import WeirError, When
from vllm_weir.config.settings import Settings
from vllm_weir.schema.gates import parse_controllers
from vllm_weir.schema.sinks import SinkDefinition


def test_controllers_are_read_from_objects_and_from_text():
    given = {"warmth": {"thermostat": {"target": 2}, "required": True}, "steady": {"pkg.module:Class.Inner": {}}}
    found = parse_controllers(given)
    assert found["warmth"] == SinkDefinition("thermostat", '{"target": 2}', required=True)
    assert found["steady"].consumer == "pkg.module:Class.Inner"
    text = '{"warmth": {"thermostat": {"target": 2}, "required": true}, "steady": {"pkg.module:Class.Inner": {}}}'
    assert Settings.load(None, {"WEIR_CONTROLLERS": text}).controllers == found
    assert Settings.load({"weir": {"controllers": given}}, {}).controllers == found
    assert not Settings.load(None, {}).controllers


WRONG = {
    "settings.controllers": ["{", [], {"a:b": {"x": {}}}],
    "settings.controllers.a": [{"a": wrong} for wrong in ({"x y": {}}, {"x:y:z": {}}, {"os:1": {}}, {})],
    "settings.controllers.a.keep": [{"a": {"x": {}, "keep": "marked"}}],
    "settings.controllers.a.policy": [{"a": {"x": {}, "policy": "wait"}}],
    "settings.controllers.a.x": [{"a": {"x": 3}}],
}


@pytest.mark.parametrize(("field", "given"), pairs(WRONG))
def test_wrong_ones_are_refused(field, given):
    with refused(field):
        parse_controllers(given)


def test_a_gate_that_names_a_controller():
    when = When("controller:warmth")
    assert when.controller == "warmth" and when.to_json() == {"probe": "controller:warmth"}
    assert When.parse(when.to_json(), "when") == when
    assert When("controller:warmth", above=0).controller == "", "a probe of that name"
    assert When("warmth", above=0).controller == ""
    for more in ({"latch": True}, {"delay": 1}, {"sharpness": 2.0}, {"output": 0}):
        with refused(f"when.{next(iter(more))}", "a controller, which gives the strength itself"):
            When("controller:warmth", **more)
    for name in ("warmth", "controllers:x", "controller:"):
        with pytest.raises(WeirError, match="give above or below"):
            When(name)
