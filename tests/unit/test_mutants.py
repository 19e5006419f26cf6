"""The table of seeded faults fits the source, and the tests notice each of them."""

from __future__ import annotations

import pytest

from tests.mutants import results
from tests.mutants.table import ROOT, load

TABLE = load()


@pytest.mark.parametrize("name", TABLE)
def test_a_fault_changes_one_place_and_names_tests_that_exist(name):
    fault = TABLE[name]
    assert fault.applied() != fault.original()  # raises unless `old` is there exactly once
    assert fault.tests and all((ROOT / test).exists() for test in fault.tests)
    assert not any("::" in test for test in fault.tests), "tests are named by folder or file: their names change"
    assert fault.fault.endswith(".")


def test_every_fault_was_run_and_none_survived():
    stored = results.read()
    assert len(TABLE) >= 66 and stored.keys() == TABLE.keys()
    assert [name for name, result in stored.items() if result["killed_by"] is None] == []
    assert results.PAGE.read_text() == results.page(TABLE, stored), "`make mutants` writes the page"
