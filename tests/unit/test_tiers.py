"""Tiers and reach: which tests a run has, what it says at the end, and which files a change reaches."""

from __future__ import annotations

import json

import pytest

from tests import reach, tiers

UNTOUCHED = "tests/unit/server/test_page_scripts.py"
REPORT = """<testsuites><testsuite>
<testcase classname="tests.unit.test_tiers" name="a" time="1.25"/>
<testcase classname="tests.unit.test_tiers.TestClass" name="b" time="0.5"><failure message="no"/></testcase>
<testcase classname="tests.unit.test_codec" name="c" time="0.1"><skipped message="no moon"/></testcase>
<testcase classname="tests.unit.test_codec" name="d" time="0.1"><skipped message="no moon"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def outcomes(tmp_path):
    (tmp_path / "unit.xml").write_text(REPORT)
    return tiers.read_report(tmp_path / "unit.xml")


def test_the_end_names_what_failed_and_what_was_skipped_and_why(outcomes):
    assert tiers.summary(outcomes, 90) == [
        "",
        "FAILED tests/unit/test_tiers.py: b",
        "skipped, no moon: tests/unit/test_codec.py (2)",
        "[tests] 1.5 minutes",
        "1 passed, 1 failed, 2 skipped",
    ]
    assert tiers.read_report(tiers.ROOT / "missing.xml") == []


def test_failed_tests_run_again_alone_and_those_that_pass_are_unsteady(tmp_path):
    """What fails again, what does not run again, and what is more than a few stay failures."""
    names = {"passes": "passed", "fails": "failed", "lost": None}
    outcome = lambda file, name, verdict: tiers.Outcome(file, name, verdict, "", 1.0, f"{file}::{name}")
    first = [outcome("tests/unit/test_tiers.py", name, "failed") for name in names] + [
        outcome("tests/reach.py", "other", "passed")
    ]
    first += [outcome("tests/unit/test_tiers.py", "passes", "failed")]  # its teardown
    first += [outcome("tests/unit/test_codec.py", "passes", "failed")]
    asked = []

    def run(part, ids):
        asked.append(list(ids))
        cases = "".join(
            f'<testcase classname="{test.split(".")[0].replace("/", ".")}" name="{name}">'
            + ("<failure/>" if names[name] == "failed" else "")
            + "</testcase>"
            for test in ids
            if names[name := test.rpartition("::")[2]]
        )
        (tmp_path / f"{part}.xml").write_text(f"<testsuite>{cases}</testsuite>")

    found = tiers.run_again(first, 4, run, tmp_path)
    assert asked == [
        ["tests/unit/test_tiers.py::passes", "tests/unit/test_tiers.py::fails", "tests/unit/test_tiers.py::lost"],
        ["tests/unit/test_codec.py::passes"],
    ]
    assert [one.verdict for one in found] == ["unsteady", "failed", "failed", "passed", "unsteady", "unsteady"]
    assert tiers.run_again(first, 3, run, tmp_path) == first and len(asked) == 2
    assert "1 passed, 0 failed, 1 unsteady" in tiers.summary([first[3], first[0]._replace(verdict="unsteady")], 1)


def test_what_pytest_runs_a_test_by(outcomes):
    assert [one.id for one in outcomes[:3]] == [
        "tests/unit/test_tiers.py::a",
        "tests/unit/test_tiers.py::TestClass::b",
        "tests/unit/test_codec.py::c",
    ]


def test_durations_are_those_of_files_with_their_commit(outcomes, tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "DURATIONS", tmp_path / "durations.json")
    tiers.store(outcomes)
    written = json.loads((tmp_path / "durations.json").read_text())
    assert written["seconds"] == {"tests/unit/test_codec.py": 0.2, "tests/unit/test_tiers.py": 1.8}
    assert len(written["commit"]) == 40


def test_fast_leaves_out_what_is_thorough_and_all_does_not():
    for part in tiers.PARTS:
        (fast, all_) = (tiers._runs(tier, None)[part] for tier in ("fast", "all"))
        assert "not thorough" in fast[fast.index("-m") + 1] and "thorough" not in all_[all_.index("-m") + 1]
        assert "--hypothesis-profile=thorough" in all_ and "--hypothesis-profile=thorough" not in fast


@pytest.mark.parametrize(
    "changed, reached, not_reached",
    [
        ("src/vllm_weir/codec.py", ["tests/unit/test_codec.py", "tests/engine/test_compress.py"], [UNTOUCHED]),
        ("src/vllm_weir/worker/runtime.py", ["tests/engine/test_steer_ops.py"], ["tests/unit/test_codec.py"]),
        ("src/vllm_weir/experiments/sweep/plan.py", ["tests/engine/test_sweep.py"], ["tests/engine/test_steer_ops.py"]),
        ("tests/support/oracle.py", ["tests/engine/test_families.py"], ["tests/unit/test_codec.py"]),
        ("tests/engine/test_fit.py", ["tests/engine/test_fit.py"], ["tests/engine/test_families.py"]),
        ("README.md", ["tests/engine/test_docs.py", "tests/unit/test_docs.py"], ["tests/engine/test_families.py"]),
        ("pyproject.toml", ["tests/engine/test_families.py", "tests/unit/test_docs.py"], []),
        ("tests/engine/conftest.py", ["tests/engine/test_families.py"], []),
    ],
)  # fmt: skip
def test_a_change_reaches_what_imports_it(changed, reached, not_reached):
    found = reach.reached_tests([changed])
    assert set(reached) <= set(found) and not set(not_reached) & set(found)


def test_without_a_commit_to_compare_with_everything_is_reached():
    assert reach.changed_since(None) is None and reach.changed_since("no such commit") is None
    assert reach.reached_tests(None) == reach.reached_tests(["pyproject.toml"])
