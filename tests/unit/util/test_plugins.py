"""Plugins by name, and by ``module:class``."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from tests.unit.refusals import refused
from vllm_weir import WeirError
from vllm_weir.util import plugins
from vllm_weir.util.plugins import PluginGroup


def test_names_are_those_of_the_group_and_of_weir(monkeypatch, caplog):
    found = [EntryPoint("own", "other:Own", "g"), EntryPoint("mine", "builtins:dict", "g")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found if group == "g" else [])
    plugins.warn_unused.cache_clear()
    group = PluginGroup("g", "tool", {"own": "builtins:list"})
    assert group.names() == {"own": "builtins:list", "mine": "builtins:dict"}
    assert "the tool 'own' of some package (other:Own) is not used" in caplog.text
    assert group.load("own", "at") is list and group.load("mine", "at") is dict
    assert group.load("builtins:set", "at") is set
    for name, why in (
        ("his", "no tool 'his' is installed; there are mine, own"),
        ("builtins:none", "cannot be imported"),
    ):
        with refused("at", why):
            group.load(name, "at")
    with pytest.raises(WeirError, match="none is"):
        PluginGroup("empty", "tool").load("x", "at")


def test_an_object_is_made_with_its_options():
    group = PluginGroup("g", "tool")
    assert group.make(dict, "d", {"a": 1}, "at") == {"a": 1}

    def refuses(**options):
        raise WeirError("no", "a")

    for plugin, field in ((refuses, "at.d.a"), (int, "at.d")):
        with refused(field):
            group.make(plugin, "d", {"a": 1}, "at")
