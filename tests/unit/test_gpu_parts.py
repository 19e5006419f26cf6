"""`python -m tests.gpu`: parts share out all tests, files stay together, and a process that dies loses no test."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from tests.gpu import __main__ as gpu


@pytest.fixture
def tests(monkeypatch):
    """Three hundred tests of nine files, some of which take long, and a file of two cards."""
    found = [(f"tests/engine/test_{k % 9}.py::test[{k}]", 1) for k in range(300)]
    found = sorted(found) + [(f"tests/gpu/test_pair.py::test[{k}]", 2) for k in range(3)]
    seconds = {test: 0.1 + (k % 7) ** 2 for k, (test, _) in enumerate(found)}
    monkeypatch.setattr(gpu, "durations", lambda: seconds)
    return found


@pytest.mark.parametrize("n", [1, 3, 4, 50])
def test_parts_share_out_all_tests(tests, n):
    units = gpu.units(tests)
    parts = [gpu.part_of(units, f"{k}/{n}") for k in range(1, n + 1)]
    assert sorted(test for part in parts for unit in part for test in unit.tests) == sorted(
        t for t, c in tests if c == 1
    )
    assert {unit.file for unit in gpu.part_of(units, "two")} == {"tests/gpu/test_pair.py"}
    assert gpu.part_of(units, None) == units
    sums = [sum(unit.seconds for unit in part) for part in parts]
    assert max(sums) - min(sums) <= max(unit.seconds for unit in units)
    for unit in units:
        assert {test.partition("::")[0] for test in unit.tests} == {unit.file}
        assert len(unit.tests) == 1 or unit.seconds <= gpu.START + gpu.TOGETHER


def test_what_a_process_did_not_reach_has_failed(tmp_path):
    names = [f"tests/gpu/test_a.py::test_{name}" for name in ("good", "bad", "skipped", "crashed", "behind")]
    said = [
        [{"began": True}, {"outcome": "passed", "seconds": 1.0}, {"outcome": "passed", "seconds": 2.0}],
        [{"began": True}, {"outcome": "failed", "seconds": 1.0, "reason": "no\n  good"}],
        [{"began": True}, {"outcome": "skipped", "seconds": 0.0, "reason": "needs 2 GPUs"}],
        [{"began": True}],
        [],
    ]
    results = tmp_path / "results"
    results.write_text(
        "".join(json.dumps({"test": t, **line}) + "\n" for t, lines in zip(names, said) for line in lines)
    )
    process = subprocess.Popen([sys.executable, "-c", "import os; os.abort()"])
    process.wait()
    unit = gpu.Unit("tests/gpu/test_a.py", 1, names)
    found = gpu.outcomes(gpu.Running(unit, (0,), process, results, tmp_path / "log", time.monotonic()), None)
    assert list(found) == names
    assert [of["outcome"] for of in found.values()] == ["passed", "failed", "skipped", "failed", "failed"]
    assert found[names[0]] == {"outcome": "passed", "seconds": 3.0} and found[names[1]]["reason"] == "no good"
    assert found[names[3]]["reason"] == "the process ended with -6"
    assert found[names[4]]["reason"] == "not reached: the process ended with -6"


def test_a_part_keeps_what_the_others_found(tmp_path):
    path, facts = tmp_path / "r.json", {"card": "NVIDIA H100 80GB HBM3", "vllm": "0.26.0"}
    one, other = ({f"tests/gpu/test_a.py::{name}": {"outcome": how, "seconds": 1.0}} for name, how in
                  (("a", "passed"), ("b", "failed")))  # fmt: skip
    known = {*one, *other, "tests/gpu/test_a.py::c"}
    gpu.store(path, facts, one, known)
    gpu.store(path, facts, other, known)
    stored = json.loads(path.read_text())
    assert stored["tests"] == one | other
    assert [stored[key] for key in ("passed", "failed", "skipped", "not run")] == [1, 1, 0, 1]
    gpu.store(path, facts, one, None)
    assert json.loads(path.read_text())["tests"] == one | other
    gpu.store(path, facts | {"vllm": "0.33.0"}, other, known)
    assert json.loads(path.read_text())["tests"] == other
    assert gpu.default_out(facts).name == "gpu_tests_h100_vllm026.json"
