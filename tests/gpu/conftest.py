"""What the tests on a GPU share."""

from __future__ import annotations

import pytest

from tests.support.engines import close_all
from tests.support.models import make_model


@pytest.fixture(scope="module", autouse=True)
def clean():
    """No engine outlives its file: the next one needs the device's memory."""
    yield
    close_all()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny Llama."""
    return make_model("llama", "a", tmp_path_factory.mktemp("models"))
