"""The order of the tests, and which of them stay together when they are shared out to several workers.

`make test` runs two workers (pytest-xdist, `--dist loadgroup`): a group goes to one of them as a whole, the next to
whoever is free. What takes longest starts first, so that neither is left with a long one at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
    "server": ("test_client_server", "test_inspect"),
}
GROUP_OF = {file: group for group, files in TOGETHER.items() for file in files}
# Minutes each; the other files with engines follow, then the rest.
LONGEST = ("engine", "server", "test_serve", "test_page", "test_representatives")
WITH_ENGINES = ("engine", "traps")


def group_of(item: pytest.Item) -> str:
    file, folder = item.path.stem, item.path.parent.name
    return GROUP_OF.get(file, file) if folder in WITH_ENGINES or file in LONGEST else f"{folder}/{file}"


def place(item: pytest.Item) -> tuple[int, str, int]:
    group = group_of(item)
    rank = LONGEST.index(group) if group in LONGEST else len(LONGEST) + (item.path.parent.name not in WITH_ENGINES)
    return rank, group, TOGETHER[group].index(item.path.stem) if group in TOGETHER else 0


# A wrapper, so that it comes before xdist reads the groups.
@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    items.sort(key=place)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
    return (yield)
