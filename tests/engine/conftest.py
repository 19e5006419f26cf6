"""Engines and servers that tests share: started when first asked for, closed at the end."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.engines import close_all
from tests.support.models import temporary_root
from tests.support.named import named_llm
from tests.support.probe_reference import GatedOracle
from tests.support.references import reference
from tests.support.remembered import REFERENCES
from tests.support.zygote import ROOT, zygote


class Served(NamedTuple):
    """A running server."""

    url: str
    model: str
    api_key: str
    admin_key: str


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
def no_engine_left_over(request: pytest.FixtureRequest, shared_server: ExitStack):
    """A file that starts processes of its own asks for memory back first."""
    if getattr(request.module, "CLOSE_OTHERS", False):
        close_all()
    if not getattr(request.module, "SHARES_SERVER", False):
        shared_server.close()
    yield


@pytest.fixture(scope="session")
def shared_server() -> Iterator[ExitStack]:
    """Holds the server of the files with SHARES_SERVER, which stand together; others find it gone."""
    with ExitStack() as stack:
        yield stack


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


@pytest.fixture(scope="session")
def weir_server(offline_answers: Path, shared_server: ExitStack, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """`weir serve` of the shipped model in float32; it can load adapters. For files with SHARES_SERVER."""
    from tests.engine.serving import ADMIN_KEY, API_KEY, WEIR, running

    close_all()
    log = tmp_path_factory.mktemp("server") / "log"
    more = ("--weir-admin-key", ADMIN_KEY, "--enable-lora", "--max-lora-rank", "8")
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    http = shared_server.enter_context(running(log, WEIR, *more, env=env, forked=True))
    return Served(str(http.base_url).rstrip("/"), "demo", API_KEY, ADMIN_KEY)
