"""What a server warms before it is ready: what it was started with, one name at a time."""

from __future__ import annotations

import asyncio
import logging

import pytest
import torch

import vllm_weir as weir
from tests.support.hook_functions import clamp_norm
from tests.unit.admin_app import D, serving
from vllm_weir.errors import WeirError
from vllm_weir.frontend.warm import Warmed
from vllm_weir.schema.keys import WIRE_KEY
from vllm_weir.server import context, warm
from vllm_weir.server.limits import ServerLimits

DONE = Warmed(1, 40, 0, 0, 5 << 20, 0, 1.5)


@pytest.mark.parametrize(("values", "expected"), [([], True), (["off"], False), (["off", "on"], True)])
def test_the_option_is_a_limit_of_the_environment(values, expected):
    environ = {}
    warm.put_option(values, environ)
    assert ServerLimits.load(environ).warm is expected


@pytest.mark.parametrize("value", ["yes", "OFF", "1"])
def test_other_values_are_refused(value):
    with pytest.raises(WeirError, match="expected on or off") as e:
        warm.put_option([value], {})
    assert e.value.field == "--weir-warm"


@pytest.fixture
def warmed(monkeypatch):
    """What the engine was asked to warm; a probe named "bad" cannot be."""
    found = []

    async def noted(engine, params, *options):
        (asked,) = (one.extra_args[WIRE_KEY] for one in params)
        if asked.get("probes") == ["bad"]:
            raise WeirError("not today", "probes")
        assert context._rows_used.get(), "these answers are nobody's"
        found.append((asked, options))
        return DONE

    monkeypatch.setattr(warm, "warm_async", noted)
    return found


def start(server):
    names = server.frontend.names
    names.register_hook("clip", weir.Hook(clamp_norm, layers=[1], args={"most": 5.0}, mode="compiled"))
    names.register_hook("eager", weir.Hook(clamp_norm, layers=[1], args={"most": 5.0}))
    for name in ("bad", "good"):
        names.register_probe(weir.Probe(name, torch.ones(D), layer=2))
    asyncio.run(warm.load_given(server))


def test_what_has_a_name_is_warmed_and_the_log_tells_how(tmp_path, warmed, monkeypatch, caplog, capsys):
    monkeypatch.setattr(logging.getLogger("vllm_weir"), "propagate", True)
    with serving(tmp_path, 1) as (server,):
        start(server)
    (clip, _), (good, _) = warmed
    assert clip["hooks"] == [{"op": "hook", "name": "clip"}] and good["probes"] == ["good"]
    assert {options for _, options in warmed} == {(None, None, 0)}, "no host memory is pinned"
    assert capsys.readouterr().out.splitlines() == [
        f"Weir has warmed {name}: 40 CUDA graphs (5 MiB) in 1.5 s" for name in ("the hook 'clip'", "the probe 'good'")
    ]
    assert "could not warm the probe 'bad': probes: not today" in caplog.text


def test_nothing_is_warmed_if_nothing_is_named_or_it_is_off(tmp_path, warmed):
    with serving(tmp_path, 1) as (server,):
        asyncio.run(warm.load_given(server))
    with serving(tmp_path, 1, warm=False) as (server,):
        start(server)
    assert warmed == []
