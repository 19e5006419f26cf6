"""Engines and servers that tests share: started when first asked for, closed at the end."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.serving import Server, SharedServer
from tests.support.engines import close_all
from tests.support.models import temporary_root
from tests.support.named import named_llm
from tests.support.probe_reference import GatedOracle
from tests.support.references import reference
from tests.support.remembered import REFERENCES
from tests.support.zygote import ROOT, zygote


@pytest.fixture(scope="session")
def root() -> Path:
    """Where the tiny models live: the same place for all tests of a process, so that they share engines."""
    return temporary_root()


@pytest.fixture
def llm(request: pytest.FixtureRequest, root: Path) -> Any:
    """The engine that the test, or its file, names in its mark `engine`; nothing is in its prefix cache."""
    llm = named_llm(request.node.get_closest_marker("engine").args[0], root)
    llm.reset_prefix_cache()
    return llm


@pytest.fixture
def truth(llm: Any) -> GatedOracle:
    """The reference of that engine's model."""
    return reference(Path(llm.llm_engine.model_config.model))


@pytest.fixture
def engine(llm: Any, truth: GatedOracle) -> tuple[Any, GatedOracle]:
    """Both."""
    return llm, truth


@pytest.fixture(scope="session", autouse=True)
def close_engines():
    yield
    close_all()
    REFERENCES.clear()
    gc.unfreeze()  # what `quick_start` froze: libraries complain of objects that outlive the interpreter


@pytest.fixture(scope="module", autouse=True)
def no_engine_left_over(request: pytest.FixtureRequest, shared_server: SharedServer):
    """A file that starts processes of its own asks for memory back first; the shared server lives in its group."""
    if getattr(request.module, "CLOSE_OTHERS", False):
        close_all()
    if not any("server" in mark.args for mark in request.node.iter_markers("engine")):
        shared_server.close()
    yield


@pytest.fixture(scope="session")
def shared_server() -> Iterator[SharedServer]:
    server = SharedServer()
    with contextlib.closing(server):
        yield server


@pytest.fixture(scope="session")
def offline_answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an offline engine gives for `tests.engine.serve_cases`: a directory; it ran and is gone."""
    from tests.engine.serve_cases import make_adapter

    close_all()
    where = tmp_path_factory.mktemp("offline")
    make_adapter(where / "adapter")
    done = zygote().run(["-m", "tests.engine.serve_cases", str(where)], os.environ, ROOT, where)
    assert done.returncode == 0, done.stderr[-4000:]
    return where


@pytest.fixture(scope="module")
def weir_server(shared_server: SharedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The shared server, for files marked `engine("server")`; a file finds it as it was at the start."""
    close_all()
    server = shared_server.get(tmp_path_factory.mktemp("server"))
    yield server
    server.restore()
