"""`client.py` is what `scripts/unasync.py` makes of `async_client.py`, and both have the same calls."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import vllm_weir as weir

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "unasync.py"


def unasync():
    spec = importlib.util.spec_from_file_location("weir_unasync", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_blocking_client_is_up_to_date() -> None:
    script = unasync()
    assert script.TARGET.read_text() == script.generate(script.SOURCE.read_text()), "run python scripts/unasync.py"


def test_nothing_asynchronous_is_left() -> None:
    text = unasync().TARGET.read_text().removeprefix(unasync().HEADER)
    assert "async" not in text and "await" not in text


def test_both_clients_have_the_same_calls() -> None:
    def calls(cls: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in vars(cls).items()
            if callable(member) and not name.startswith("_") and name != "model"
        }

    assert calls(weir.Client) == calls(weir.AsyncClient)
    assert isinstance(weir.Client.model, property) and inspect.iscoroutinefunction(weir.AsyncClient.model)
