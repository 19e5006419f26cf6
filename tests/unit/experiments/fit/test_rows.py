"""Where the rows of a fit are: what is raised when they are given up or missing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.refusals import refused
from vllm_weir.experiments.fit.engine import DROP, KEEP, CallerRows, WorkerRows
from vllm_weir.fitting.layer import FitTask
from vllm_weir.schema.capture import Capture
from vllm_weir.schema.hooks import Site

SITE = Site("resid_post", 1)


def worker_rows(call: Any) -> WorkerRows:
    return WorkerRows(call, Capture(SITE.hook, SITE.layer, "last_prompt"), [SITE], 2)


def test_a_failing_drop_does_not_replace_what_is_being_raised() -> None:
    def call(method: str, *_: Any) -> list[Any]:
        if method == DROP:
            raise RuntimeError("the engine is gone")
        return [{"sites": [list(SITE)]}]

    rows, interrupt = worker_rows(call), KeyboardInterrupt()
    rows.close(interrupt)
    assert "the engine is gone" in interrupt.__notes__[0]
    with pytest.raises(RuntimeError, match="the engine is gone"):
        rows.close()


def test_a_drop_that_fails_after_the_start_failed() -> None:
    def call(method: str, *_: Any) -> list[Any]:
        raise KeyboardInterrupt if method == KEEP else RuntimeError("the engine is gone")

    with pytest.raises(KeyboardInterrupt):
        worker_rows(call)


def test_a_prompt_without_a_row_is_named() -> None:
    rows = CallerRows(Capture(SITE.hook, SITE.layer, {"token_ids": [7]}), [SITE])
    outs = [SimpleNamespace(request_id=str(n), activations={SITE: torch.ones(n, 4)}) for n in (1, 0)]
    names = [rows.take(out) for out in outs]
    with refused("positive", "prompt 1 of both lists together cannot be read: positions select none"):
        rows.fit(SITE, names, FitTask("diff", 1, 1))
