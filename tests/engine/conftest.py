"""Engines are closed at the end, and tests that use the same one run next to each other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engines import close_all
from tests.support.server import Served, serving

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


@pytest.fixture(scope="session")
def offline_answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an offline engine gives for `tests.engine.serve_cases`: a directory; it ran and is gone."""
    from tests.engine.serve_cases import make_adapter

    close_all()
    where = tmp_path_factory.mktemp("offline")
    make_adapter(where / "adapter")
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-m", "tests.engine.serve_cases", str(where)], cwd=root, check=True, timeout=500)
    return where


@pytest.fixture(scope="session")
def weir_server(offline_answers: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`weir serve` of the shipped model in float32; it can load adapters."""
    import vllm_weir as weir

    close_all()
    log = tmp_path_factory.mktemp("server") / "log"
    arguments = ("--max-model-len", "256", "--enable-lora", "--max-lora-rank", "8")
    with serving(weir.demo_model(), log, *arguments, env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}) as served:
        yield served
