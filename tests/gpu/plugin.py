"""What `python -m tests.gpu` has pytest do: list tests, run some of them, and write down what comes of each.

Files that environment variables name:

* ``WEIR_TESTS_LIST``: gets what was collected, and nothing runs.
* ``WEIR_TESTS_RUN``: the names of the tests to run; the others are deselected.
* ``WEIR_TESTS_RESULTS``: gets a line as each test begins, and one when it has ended.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import machine

TAIL = 4000
"""Characters that a failed test printed, which are kept."""
LIST, RUN, RESULTS = (f"WEIR_TESTS_{name}" for name in ("LIST", "RUN", "RESULTS"))


def cards(item: pytest.Item) -> int:
    """Return how many GPUs a test needs."""
    wanted = [need for mark in item.iter_markers("needs") for need in mark.args]
    return max([1, *(need.args[0] for need in wanted if isinstance(need, partial))])


@pytest.hookimpl(trylast=True)  # in the order in which they would run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if LIST in os.environ:
        found = [(item.nodeid, cards(item), machine.missing(item)) for item in items]
        Path(os.environ[LIST]).write_text(json.dumps(found))
    if RUN in os.environ:
        chosen = set(json.loads(Path(os.environ[RUN]).read_text()))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]


def write(**line: Any) -> None:
    if RESULTS in os.environ:
        with open(os.environ[RESULTS], "a") as out:
            out.write(json.dumps(line) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    write(test=nodeid, began=True)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        write(test=report.nodeid, outcome="skipped", reason=reason.removeprefix("Skipped: "), seconds=report.duration)
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash is not None else str(report.longrepr)
        text = report.longreprtext + "\n" + report.capstdout[-TAIL:] + report.capstderr[-TAIL:]
        write(test=report.nodeid, outcome="failed", reason=reason, seconds=report.duration, text=text)
    else:
        write(test=report.nodeid, outcome="passed", seconds=report.duration)
