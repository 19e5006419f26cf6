"""Tiers, profiles and order of the tests, and which are skipped for want of something that this machine lacks.

`make test` leaves out what is marked `thorough`; `make test-all` does not (`tests/tiers.py` runs both).

When several workers share the tests out (pytest-xdist, `-n 2`), a group goes to one worker as a whole and the next
group to whoever is free: the tests of one named engine (`tests/support/named.py`), else those of one file. What takes
longest starts first (`tests/durations.json`), so that no worker is left with a long one at the end.

What will be skipped is said once the tests are collected. Under xdist only the workers collect them: each leaves what
it found in a file for the process that reports and schedules.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.support import machine
from tests.support.properties import register_profiles
from tests.tiers import stored_seconds

# The models are tiny, and OpenMP's threads wait for each other by spinning: with as many threads in every process as
# the machine has cores, most of the time goes into that. Set before torch is imported; engines in processes of their
# own inherit it, and vLLM leaves the threads as they are.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# No test needs the hub, and one that asks it for a name waits through its retries. Read when its client is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
register_profiles()

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = pytest.StashKey[list[tuple[str, str]]]()
"""(test or file, reason) of all that the machine cannot run."""
GROUPS = pytest.StashKey[dict[str, str]]()
"""File -> group, of the files whose tests use a named engine or a shared server."""
LISTS = pytest.StashKey[TemporaryDirectory[str]]()
"""Where the workers of this process leave what they found."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--until", type=float, help="skip tests that have not begun by then (seconds since the epoch)")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SKIPPED], config.stash[GROUPS] = [], {}


def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        pytest.skip("left out: the time is up")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    report = yield
    if report.skipped:  # `importorskip` at the top of a file
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        collector.config.stash[SKIPPED].append((report.nodeid, reason.removeprefix("Skipped: ")))
    return report


@pytest.hookimpl(trylast=True)  # what is deselected is gone by then
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skipped, groups = config.stash[SKIPPED], config.stash[GROUPS]
    for item in items:
        for mark in item.iter_markers("engine"):
            if mark.args:
                groups[file_of(item)] = mark.args[0]
        if (reason := machine.missing(item)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
            skipped.append((item.nodeid, reason))
    seconds = stored_seconds()
    whole: dict[str, float] = {}
    for file in dict.fromkeys(map(file_of, items)):
        group = groups.get(file, file)
        whole[group] = whole.get(group, 0.0) + seconds.get(file, 0.0)
    items.sort(key=lambda item: (-whole[groups.get(file_of(item), file_of(item))], groups.get(file_of(item), ""),
                                 file_of(item)))  # fmt: skip
    worker = getattr(config, "workerinput", None)
    if worker is not None and "found" in worker:
        Path(worker["found"]).write_text(json.dumps({"skipped": skipped, "groups": groups}))


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    return machine.announce(config.stash[SKIPPED])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    lists = node.config.stash.setdefault(LISTS, TemporaryDirectory())
    node.workerinput["found"] = str(Path(lists.name, node.gateway.id))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any) -> None:
    config, file = node.config, Path(node.workerinput["found"])
    if config.stash[GROUPS] or config.stash[SKIPPED] or not file.exists():
        return
    found = json.loads(file.read_text())
    config.stash[GROUPS] = found["groups"]
    config.stash[SKIPPED] = [(test, reason) for test, reason in found["skipped"]]
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    for line in machine.announce(config.stash[SKIPPED]):
        reporter.ensure_newline()
        reporter.write_line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return config.stash[GROUPS].get(file, file)

    config.option.loadscopereorder = False  # the order above, not by the number of tests
    return ByGroup(config, log)
