"""`scripts/new_vllm.py`: the support table and the versions in the code, without an environment."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "new_vllm.py"
PAGE = """# Limits

| vLLM | ran on | patch points | one engine | conformance | all tests | what does not work |
|---|---|---|---|---|---|---|
| 0.26.0 | V2, NVIDIA H200 | all | works | all | pass | |
| 0.28.0 | | all | not run | not run | not run | |
| 0.32.0 | V1, CPU | all | works | all | pass | |

Below the table | is | text.
"""
REGISTRY = 'RAN = ("0.26.0", "0.32.0")\n"""Ran."""\nREAD = ("0.28.0", "0.33.0")\n"""Read."""\n'


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("new_vllm", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["new_vllm"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def found(script: ModuleType, version: str = "0.28.0", **more: Any) -> Any:
    given = {
        "ran_on": "V1, CPU",
        "patch_points": "9 of 9",
        "engine": "works",
        "conformance": "24 passed",
    }
    return script.Findings(version, **(given | more))


def rows(page: Path) -> list[str]:
    return [line for line in page.read_text().splitlines() if line.startswith("| 0.")]


def test_a_row_that_was_not_run_is_replaced(script: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "limits.md"
    page.write_text(PAGE)
    script.write_table(found(script, remark="a | b"), page)
    assert rows(page)[1] == "| 0.28.0 | V1, CPU | 9 of 9 | works | 24 passed | not run | a \\| b |"
    assert len(rows(page)) == 3 and page.read_text().endswith("\n\nBelow the table | is | text.\n")
    once = page.read_text()
    script.write_table(found(script, remark="a | b"), page)
    assert page.read_text() == once


def test_rows_are_sorted_by_number_and_another_device_has_a_row_of_its_own(script: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "limits.md"
    page.write_text(PAGE)
    for version, ran_on in (("0.100.0", "V1, CPU"), ("0.29.1", "V1, CPU"), ("0.32.0", "V2, NVIDIA H200")):
        script.write_table(found(script, version, ran_on=ran_on), page)
    cells = [script.first_cells(row) for row in rows(page)]
    versions = [version for version, _ in cells]
    assert versions == ["0.26.0", "0.28.0", "0.29.1", "0.32.0", "0.32.0", "0.100.0"]
    assert {cells[3][1], cells[4][1]} == {"V1, CPU", "V2, NVIDIA H200"}


@pytest.mark.parametrize(
    ("more", "ran", "read"),
    [
        ({}, {"0.26.0", "0.28.0", "0.32.0"}, {"0.33.0"}),
        ({"conformance": "23 passed, 1 failed (`test_conforms[x]`)"}, {"0.26.0", "0.32.0"}, {"0.28.0", "0.33.0"}),
        ({"conformance": "9 passed, 1 failed (`x`)", "remark": "Y."}, {"0.26.0", "0.28.0", "0.32.0"}, {"0.33.0"}),
        ({"engine": "no result (exit code 1)", "remark": "Y."}, {"0.26.0", "0.32.0"}, {"0.28.0", "0.33.0"}),
        ({"engine": "no result (exit code 1)", "patch_points": "8 of 9 (without x)"}, {"0.26.0", "0.32.0"}, {"0.33.0"}),
    ],
)
def test_versions_in_the_code(
    script: ModuleType, tmp_path: Path, more: dict[str, str], ran: set[str], read: set[str]
) -> None:
    registry = tmp_path / "registry.py"
    registry.write_text(REGISTRY)
    script.write_versions(found(script, **more), registry)
    text = registry.read_text()
    assert (script.listed(text, "RAN"), script.listed(text, "READ")) == (ran, read)
    assert '"""Ran."""' in text and compile(text, "registry", "exec")


def test_a_version_that_ran_elsewhere_stays_listed(script: ModuleType, tmp_path: Path) -> None:
    registry = tmp_path / "registry.py"
    registry.write_text(REGISTRY)
    script.write_versions(found(script, "0.32.0", conformance="no result"), registry)
    assert registry.read_text() == REGISTRY
    registry.write_text("NONE = ()\n")
    with pytest.raises(ValueError, match="no line `RAN"):
        script.write_versions(found(script), registry)


def test_what_the_steps_say_is_read(script: ModuleType, tmp_path: Path) -> None:
    assert script.parse_patch_points("src: 9 of 9 seams as expected\n") == "9 of 9"
    wrong = "src: 8 of 9 seams as expected\n  vllm.v1.core:Scheduler.schedule: not found\n"
    assert script.parse_patch_points(wrong) == "8 of 9 (without schedule)"
    assert script.parse_patch_points("Traceback") == "no result"
    assert script.parse_doctor('noise\n{"healthy": true, "problems": []}', 0) == "works"
    assert script.parse_doctor('{"healthy": false, "problems": ["the self-test failed\\nmore"]}', 1) == (
        "the self-test failed"
    )
    assert script.parse_doctor("", 3) == "no result (exit code 3)"
    report = tmp_path / "report.xml"
    assert script.parse_junit(report) == "no result"
    report.write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b[x]"><failure/></testcase>'
        '<testcase name="c"><skipped/></testcase></testsuite></testsuites>'
    )
    assert script.parse_junit(report) == "1 passed, 1 failed (`b[x]`), 1 skipped"


def test_the_table_is_written_from_a_file(script: ModuleType, tmp_path: Path, monkeypatch: Any) -> None:
    page, registry, results = tmp_path / "limits.md", tmp_path / "registry.py", tmp_path / "found.json"
    page.write_text(PAGE)
    registry.write_text(REGISTRY)
    results.write_text(json.dumps({"vllm": "0.28.0", "ran_on": "V1, CPU", "patch_points": "9 of 9", "engine": "works"}))
    monkeypatch.setattr(script, "ROOT", tmp_path)
    for function, path in ((script.write_table, page), (script.write_versions, registry)):
        monkeypatch.setattr(function, "__defaults__", (path,))
    monkeypatch.setattr(script, "TABLE", page)
    monkeypatch.setattr(script, "REGISTRY", registry)
    arguments = ["new_vllm.py", "0.28.0", "--table-only", "--results", str(results), "--remark", "Y."]
    monkeypatch.setattr(sys, "argv", arguments)
    assert script.main() == 0
    assert rows(page)[1].startswith("| 0.28.0 | V1, CPU | 9 of 9 | works | not run |") and rows(page)[1].endswith(
        "Y. |"
    )
    assert "0.28.0" in script.listed(registry.read_text(), "RAN")


def test_the_repository_has_the_table_and_the_constants(script: ModuleType) -> None:
    assert script.HEADER in script.TABLE.read_text().splitlines()
    assert script.listed(script.REGISTRY.read_text(), "RAN")
    assert script.CHECKER.exists()
