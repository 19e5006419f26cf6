"""The order of the tests, and which of them stay together when several workers share them out (pytest-xdist, `-n 2`).

A group goes to one worker as a whole, the next group to whoever is free. What takes longest starts first, so that no
worker is left with a long one at the end.
"""

from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import Any

import pytest

# The models are tiny, and OpenMP's threads wait for each other by spinning: with as many threads in every process as
# the machine has cores, most of the time goes into that. Set before torch is imported; engines in processes of their
# own inherit it, and vLLM leaves the threads as they are.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = PurePosixPath(nodeid.split("::", 1)[0])
            return group_of(path.parent.name, path.stem)

    config.option.loadscopereorder = False  # the order above, not by the number of tests
    return ByGroup(config, log)
