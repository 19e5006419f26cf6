"""The environment variables of Vllm_mi_patch that ask for nothing here."""

from __future__ import annotations

import logging
import multiprocessing

import pytest

from vllm_weir.config import env, mi_patch_env
from vllm_weir.config.settings import Settings

ON = {"VLLM_ACT_CAPTURE": "1"}


@pytest.fixture(autouse=True)
def anew():
    for told in (env._warn, mi_patch_env._warn_of_per_dim):
        told.cache_clear()
    yield
    for told in (env._warn, mi_patch_env._warn_of_per_dim):
        told.cache_clear()


def messages(caplog: pytest.LogCaptureFixture, *environments: dict[str, str]) -> list[str]:
    with caplog.at_level(logging.WARNING):
        for one in environments:
            Settings.load({}, one)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("mode", ["rp8", "full8"])
def test_a_scale_per_dimension_is_told_of_once(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    (message,) = messages(caplog, *[ON | {"VLLM_ACT_PER_DIM": "1", "VLLM_ACT_MODE": mode}] * 4)
    assert message.startswith("VLLM_ACT_PER_DIM has no effect")


@pytest.mark.parametrize("process", ["EngineCore", "EngineCore_DP1", "VllmWorker-3"])
def test_the_engines_own_processes_do_not_tell_again(
    process: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "name", process)
    assert not messages(caplog, ON | {"VLLM_ACT_PER_DIM": "1"})


@pytest.mark.parametrize(
    "more",
    [
        {"PER_DIM": "0"}, {"PER_DIM": "1", "MODE": "topk8"}, {"PER_DIM": "1", "MODE": "none"},
        {"PER_DIM": "1", "RETURN": "summary"}, {"BITS": "8", "ATTNM": "0", "HIDDEN_SIZE": "1024"},
    ],
)  # fmt: skip
def test_what_means_the_same_there_is_not_told_of(more: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    assert not messages(caplog, ON | {f"VLLM_ACT_{name}": value for name, value in more.items()})


def test_the_hint_names_what_has_a_meaning(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = messages(caplog, {"VLLM_ACT_BIT": "8"})
    assert "variable VLLM_ACT_BIT and ignores it" in message and "VLLM_ACT_BITS" not in message
