"""Environment variables that mean nothing."""

from __future__ import annotations

import logging

import pytest

from vllm_weir.config import env as module
from vllm_weir.config.settings import Settings
from vllm_weir.server.limits import ServerLimits


@pytest.fixture(autouse=True)
def anew():
    module._warn.cache_clear()
    yield
    module._warn.cache_clear()


@pytest.mark.parametrize(
    ("load", "name", "near"),
    [
        (lambda env: Settings.load({}, env), "WEIR_LAYER", "WEIR_LAYERS"),
        (lambda env: Settings.load({}, env), "WEIR_NONSENSE", None),
        (ServerLimits.load, "WEIR_SERVE_ROW", "WEIR_SERVE_ROWS"),
        (lambda env: Settings.load({}, env), "VLLM_ACT_CAPTRUE", "VLLM_ACT_CAPTURE"),
        (lambda env: Settings.load({}, env), "VLLM_ACT_ZZZ", None),
    ],
)
def test_a_misspelt_variable_is_told_of_once(load, name, near, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            load({name: "1"})
    (record,) = caplog.records
    assert name in record.getMessage() and (f"did you mean {near}?" in record.getMessage()) == (near is not None)
    if name.startswith("VLLM_ACT_"):
        assert all(f"VLLM_ACT_{known}" in record.getMessage() for known in ("CAPTURE", "MODE", "OUTDIR", "PER_DIM"))


@pytest.mark.parametrize("load", [lambda env: Settings.load({}, env), ServerLimits.load])
def test_variables_that_mean_something_are_not(load, caplog):
    known = {
        "WEIR_LAYERS": "1",
        "WEIR_DISABLE": "",
        "WEIR_ADMIN_KEY": "x",
        "WEIR_API_KEY": "x",
        "WEIR_BASE_URL": "http://x",
    }
    known |= {f"VLLM_ACT_{name}": "" for name in ("CAPTURE", "PER_DIM")} | {"VLLM_ACT_RP_K": "64", "VLLM_ACTIVE": "1"}
    load(known | {"WEIR_SERVE_ROWS": "7", "WEIR_TEST_GPU_SHARE": "0.1", "HOME": "/", "WEIRD": "1"})
    assert not caplog.records
