"""Engines are closed at the end, and tests that use the same one run next to each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines import close_all

# Files whose tests share the default engine stand together; those that start many of their own come after.
ORDER = (
    "test_support_models",
    "test_requests",
    "test_user_objects",
    "test_fuzz_engine",
    "test_leaks",
    "test_rivals",
    "test_exact",
    "test_batching",
    "test_neighbours",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parents[1]

    def place(item: pytest.Item) -> int:
        if item.path.parent.name not in ("engine", "traps") or here not in item.path.parents:
            return -1
        return ORDER.index(item.path.stem) if item.path.stem in ORDER else len(ORDER)

    items.sort(key=place)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny models live."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session", autouse=True)
def close_engines():
    yield
    close_all()


@pytest.fixture(scope="module", autouse=True)
def no_engine_left_over(request: pytest.FixtureRequest):
    """A file that starts processes of its own asks for memory back first."""
    if getattr(request.module, "CLOSE_OTHERS", False):
        close_all()
    yield
