"""hotwire as a system of `weir bench`, without its package: the files and the names of vectors, and no comparison."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.systems.hotwire import HotwireSystem
from tests.unit.bench.fakes import Fake, plan, run_fake
from vllm_weir.bench.plan import BatchSize
from vllm_weir.bench.systems.stock import StockSystem

SIZE = BatchSize(kind="decode", count=3, prompt=4, generated=2)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HotwireSystem:
    monkeypatch.setattr(StockSystem, "base", lambda self, size, extra=None: extra)
    monkeypatch.setattr(StockSystem, "start", lambda self, arguments: dict(os.environ))
    for name in ("HOTWIRE_VECTORS", "HOTWIRE_SLOTS"):
        monkeypatch.setenv(name, "")
    return HotwireSystem(plan(cases=("steer_one", "steer_all_distinct"), batches=(1, 4)), tmp_path)


def named(asked: list[Any]) -> list[list[dict[str, Any]]]:
    return [json.loads(extra["hotwire"]) for extra in asked]


def test_every_request_names_the_vector_that_weir_s_adds(system: HotwireSystem) -> None:
    environment = system.start({})
    folder = Path(environment["HOTWIRE_VECTORS"])
    assert environment["HOTWIRE_SLOTS"] == str(4 * 6) and len(list(folder.iterdir())) == 4
    for layers, asked in (
        ([2], system.params("steer_one", SIZE)),
        (list(range(6)), system.params("steer_all_distinct", SIZE)),
    ):
        for request, entries in enumerate(named(asked)):
            assert [entry["layer"] for entry in entries] == layers
            assert {(entry["id"], entry["scale"]) for entry in entries} == {(str(request), 1.0)}
            assert torch.equal(torch.load(folder / f"{request}.pt"), system.vectors(4)[request])
    assert system.params("idle", SIZE) == [None] * 3


def test_there_are_slots_for_the_blocks_that_the_cases_steer(system: HotwireSystem) -> None:
    system.plan = plan(cases=("idle", "steer_one"), batches=(1, 4))
    assert system.start({})["HOTWIRE_SLOTS"] == "4"


def test_what_it_adds_is_said_not_to_be_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = run_fake(monkeypatch, tmp_path, cases=("idle", "steer_one"), systems=("stock", "weir", "hotwire"))
    steered = [case for case in found.cases if case.system == "hotwire" and case.case == "steer_one"]
    assert steered and all("not compared" in str(case.note) for case in steered)
    assert {check.system for check in found.checks} == {"weir"}
    assert not any(system == "hotwire" and count == 0 for system, _, count in Fake.calls)
