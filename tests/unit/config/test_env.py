"""Environment variables that mean nothing, of Weir and of Vllm_mi_patch."""

from __future__ import annotations

import logging

import pytest

from vllm_weir.compat.mi_patch import environment
from vllm_weir.config import env
from vllm_weir.config.settings import Settings
from vllm_weir.server.limits import ServerLimits


@pytest.fixture(autouse=True)
def anew():
    for told in (env._warn, environment._warn_of_per_dim):
        told.cache_clear()
    yield
    for told in (env._warn, environment._warn_of_per_dim):
        told.cache_clear()


def messages(caplog, *environments, load=None):
    with caplog.at_level(logging.WARNING):
        for one in environments:
            (load or settings)(one)
    return caplog.messages


def settings(env):
    return environment.settings_of({}, env)


LOAD = [settings, ServerLimits.load]


@pytest.mark.parametrize(
    ("load", "name", "near"),
    [
        (settings, "WEIR_LAYER", "WEIR_LAYERS"),
        (settings, "WEIR_NONSENSE", None),
        (ServerLimits.load, "WEIR_SERVE_ROW", "WEIR_SERVE_ROWS"),
        (settings, "VLLM_ACT_CAPTRUE", "VLLM_ACT_CAPTURE"),
        (settings, "VLLM_ACT_ZZZ", None),
    ],
)
def test_a_misspelt_variable_is_told_of_once(load, name, near, caplog):
    (message,) = messages(caplog, *[{name: "1"}] * 3, load=load)
    assert name in message and (f"did you mean {near}?" in message) == (near is not None)
    if name.startswith("VLLM_ACT_"):
        assert all(f"VLLM_ACT_{known}" in message for known in ("CAPTURE", "MODE", "OUTDIR", "PER_DIM"))


@pytest.mark.parametrize("load", LOAD)
def test_variables_that_mean_something_are_not(load, caplog):
    known = {
        "WEIR_LAYERS": "1",
        "WEIR_DISABLE": "",
        "WEIR_ADMIN_KEY": "x",
        "WEIR_API_KEY": "x",
        "WEIR_BASE_URL": "http://x",
    }
    known |= {f"VLLM_ACT_{name}": "" for name in ("CAPTURE", "PER_DIM")} | {"VLLM_ACT_RP_K": "64", "VLLM_ACTIVE": "1"}
    known |= {"WEIR_SERVE_ROWS": "7", "WEIR_TEST_GPU_SHARE": "0.1", "HOME": "/", "WEIRD": "1"}
    assert not messages(caplog, known, load=load)


ON = {"VLLM_ACT_CAPTURE": "1"}


@pytest.mark.parametrize("mode", ["rp8", "full8"])
def test_a_scale_per_dimension_is_told_of_once(mode, caplog):
    (message,) = messages(caplog, *[ON | {"VLLM_ACT_PER_DIM": "1", "VLLM_ACT_MODE": mode}] * 4)
    assert message.startswith("VLLM_ACT_PER_DIM has no effect")


def test_the_engines_own_processes_do_not_tell_again(caplog):
    """They read the settings without the sink of these variables, which the caller's process sets up."""
    assert not messages(caplog, ON | {"VLLM_ACT_PER_DIM": "1"}, load=lambda env: Settings.load({}, env))


@pytest.mark.parametrize(
    "more",
    [
        {"PER_DIM": "0"}, {"PER_DIM": "1", "MODE": "topk8"}, {"PER_DIM": "1", "MODE": "none"},
        {"PER_DIM": "1", "RETURN": "summary"}, {"BITS": "8", "ATTNM": "0", "HIDDEN_SIZE": "1024"},
    ],
)  # fmt: skip
def test_what_means_the_same_there_is_not_told_of(more, caplog):
    assert not messages(caplog, ON | {f"VLLM_ACT_{name}": value for name, value in more.items()})


def test_the_hint_names_what_has_a_meaning(caplog):
    (message,) = messages(caplog, {"VLLM_ACT_BIT": "8"})
    assert "variable VLLM_ACT_BIT" in message and "VLLM_ACT_BITS" not in message
