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
