"""`start_llm`: what an engine that a command starts is spared, and how vLLM's refusals read."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from vllm_weir.errors import WeirError
from vllm_weir.extraction.engine import VllmEngine
from vllm_weir.extraction.run_spec import RunSpec
from vllm_weir.util.start_llm import start_llm


def blocked() -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_processes_inherit_a_mask_without_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.LLM", lambda **options: (blocked(), options))
    assert start_llm("model", {"seed": 3}) == (True, {"model": "model", "disable_log_stats": True, "seed": 3})
    assert not blocked()


@pytest.mark.parametrize("error", [TypeError, ValueError, OSError])
def test_what_vllm_refuses_is_one_line(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def llm(**arguments: Any) -> Any:
        raise error(f"no {arguments['model']}")

    monkeypatch.setattr("vllm.LLM", llm)
    for start in (lambda: start_llm("model", {}), lambda: VllmEngine(RunSpec("model"))):
        with pytest.raises(WeirError, match="vLLM cannot start: no model") as e:
            start()
        assert e.value.field == "engine" and not blocked()
