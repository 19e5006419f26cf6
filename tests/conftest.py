"""The order of the tests, which of them stay together when several workers share them out (pytest-xdist, `-n 2`), and
which are skipped for want of something that this machine lacks.

A group goes to one worker as a whole, the next group to whoever is free. What takes longest starts first, so that no
worker is left with a long one at the end.

What will be skipped is said once the tests are collected. Under xdist only the workers collect them: each leaves its
list in a file, and the process that reports shows the list of the first that is ready.
"""

from __future__ import annotations

import json
import os
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.support import machine
from tests.support.properties import register_profiles

# The models are tiny, and OpenMP's threads wait for each other by spinning: with as many threads in every process as
# the machine has cores, most of the time goes into that. Set before torch is imported; engines in processes of their
# own inherit it, and vLLM leaves the threads as they are.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# No test needs the hub, and one that asks it for a name waits through its retries. Read when its client is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

register_profiles()

# Each file of a group uses the engine, or the server, that the one before it has started.
TOGETHER = {
    "engine": (
        "test_support_models",
        "test_requests",
        "test_user_objects",
        "test_fuzz_engine",
        "test_leaks",
        "test_rivals",
        "test_exact",
        "test_batching",
        "test_neighbours",
    ),
    "probes": ("test_probes", "test_gates", "test_stops", "test_dose"),
    "inside": ("test_inside_block", "test_inside_steering"),
    "server": ("test_client_server", "test_inspect", "test_docs"),
}
GROUP_OF = {file: group for group, files in TOGETHER.items() for file in files}
# A minute and more each, the longest first; the other files with engines follow, then the rest.
LONGEST = ("engine", "test_examples", "test_extract_engine", "test_serve_processes", "test_compiled",
           "test_representatives")  # fmt: skip
WITH_ENGINES = ("engine", "traps")


def group_of(folder: str, file: str) -> str:
    return GROUP_OF.get(file, file) if folder in WITH_ENGINES or file in LONGEST else f"{folder}/{file}"


def place(item: pytest.Item) -> tuple[int, str, int]:
    folder, file = item.path.parent.name, item.path.stem
    group = group_of(folder, file)
    rank = LONGEST.index(group) if group in LONGEST else len(LONGEST) + (folder not in WITH_ENGINES)
    return rank, group, TOGETHER[group].index(file) if group in TOGETHER else 0


SKIPPED = pytest.StashKey[list[tuple[str, str]]]()
"""(test or file, reason) of all that the machine cannot run."""
LISTS = pytest.StashKey[TemporaryDirectory[str]]()
"""Where the workers of this process leave their lists."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SKIPPED] = []


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    report = yield
    if report.skipped:  # `importorskip` at the top of a file
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        collector.config.stash[SKIPPED].append((report.nodeid, reason.removeprefix("Skipped: ")))
    return report


@pytest.hookimpl(trylast=True)  # what is deselected is gone by then
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=place)
    skipped = config.stash[SKIPPED]
    for item in items:
        if (reason := machine.missing(item)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
            skipped.append((item.nodeid, reason))
    worker = getattr(config, "workerinput", None)
    if worker is not None and "skipped" in worker:
        Path(worker["skipped"]).write_text(json.dumps(skipped))


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    return machine.announce(config.stash[SKIPPED])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    lists = node.config.stash.setdefault(LISTS, TemporaryDirectory())
    node.workerinput["skipped"] = str(Path(lists.name, node.gateway.id))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any) -> None:
    config, file = node.config, Path(node.workerinput["skipped"])
    if config.stash[SKIPPED] or not file.exists():
        return
    config.stash[SKIPPED] = [(test, reason) for test, reason in json.loads(file.read_text())]
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    for line in machine.announce(config.stash[SKIPPED]):
        reporter.ensure_newline()
        reporter.write_line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = PurePosixPath(nodeid.split("::", 1)[0])
            return group_of(path.parent.name, path.stem)

    config.option.loadscopereorder = False  # the order above, not by the number of tests
    return ByGroup(config, log)
