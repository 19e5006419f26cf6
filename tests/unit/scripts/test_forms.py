"""`scripts/forms.py`: which classes hold a request, and which files know a field of one."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "forms.py"
ASKED = """
class Positions:
    kind: str
class Asked:
    positions: Any
class More(Asked):
    scale: float
class Registry:
    def __init__(self, by_id: dict[str, Asked]) -> None: ...
class Rows:
    positions: np.ndarray
"""
LIVE = """
class Live:
    def __init__(self, asked: Sequence[Asked], count: int) -> None: ...
class Batch:
    first: Live | None
class Site:
    kinds: ClassVar[tuple[Asked, ...]]
    layer: int
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("forms", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_has_a_selector_or_holds_or_extends_such_a_class_is_counted(script: ModuleType) -> None:
    trees = {"schema/asked.py": ast.parse(ASKED), "worker/live.py": ast.parse(LIVE)}
    found = script.request_classes(trees)
    assert set(found) == {"Asked", "More", "Live", "Batch"}
    assert found["Batch"] == "worker/live.py"
    assert set(script.request_classes({"server/asked.py": trees["schema/asked.py"]})) == set()  # no room of a request


@pytest.mark.parametrize("code", ["dose = 1", "a.dose", "f(dose=1)", "def f(dose): ...", '{"dose": 1}', "f(dose)"])
def test_code_that_names_a_field_knows_it(script: ModuleType, code: str) -> None:
    assert script.knows(ast.parse(code), "dose")


@pytest.mark.parametrize("code", ['"""The dose."""', "doses = 1  # dose", 'f"a dose of {x}"'])
def test_what_is_said_about_a_field_is_not_counted(script: ModuleType, code: str) -> None:
    assert not script.knows(ast.parse(code), "dose")


def test_the_classes_of_a_request_are_found_in_the_package(script: ModuleType) -> None:
    found = script.request_classes(script.parsed())
    assert {"Capture", "Add", "RequestSpec", "ResolvedSpec", "EngineSpec", "AdmittedRequest"} <= set(found)
