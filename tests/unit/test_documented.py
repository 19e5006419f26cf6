"""All that documentation names is there: names of Python, routes, settings, commands, hook points, keys and formats.

Documentation is the list: what a change takes away is missed here before a user misses it. Tests elsewhere hold the
other direction for settings (`test_docs.py`) and for keys of other systems (`test_other_systems.py`), and run what
the blocks of code do (`tests/engine/test_docs.py`).
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.metadata
import inspect
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.support.markdown import ROOT, blocks, pages
from tests.unit.test_docs import UsageError, variables
from vllm_weir.cli.main import app
from vllm_weir.config.settings import Settings
from vllm_weir.schema.compression import Compression
from vllm_weir.schema.hooks import normalise_hook
from vllm_weir.schema.request import RequestSpec
from vllm_weir.server.endpoint_plugin import load_route_modules
from vllm_weir.storage.loading import LAYOUTS

REFERENCE = ROOT / "docs" / "reference"
CHANGELOG = ROOT / "CHANGELOG.md"
"""It also names what is gone."""
ALIASES = {"weir": "vllm_weir"}
OTHERS = {"consumers", "controllers", "models", "norms", "json", "response", "scores", "NAME"}
"""What looks like a name and is none: groups of entry points, a logger, a file, keys of a body, a placeholder."""


def code(page: Path) -> Iterator[str]:
    """The programs of a page, a notebook or an example."""
    if page.suffix == ".ipynb":
        cells = json.loads(page.read_text())["cells"]
        yield from ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    elif page.suffix == ".py":
        yield page.read_text()
    else:
        yield from (block.text for block in blocks(page) if block.language == "python")


def names_of(program: str) -> Iterator[str]:
    """The dotted names of Weir that a program imports, or reads of `weir`."""
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{one.name}" for one in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{ALIASES.get(node.value.id, '')}.{node.attr}"


@cache
def documented() -> dict[str, str]:
    """Dotted name of Weir -> a page that names it."""
    found: dict[str, str] = {}
    examples = (ROOT / "examples").glob("*.py")
    for page in (*pages(), *(ROOT / "docs").rglob("*.ipynb"), *examples):
        names = [name for program in code(page) for name in names_of(program)]
        if page.suffix == ".md" and page != CHANGELOG:
            text = page.read_text()
            names += re.findall(r"^::: ([\w.]+)", text, re.M)
            names += [f"vllm_weir.{name}" for name in re.findall(r"`weir\.(\w+)[`(]", text)]
            names += re.findall(r"`(vllm_weir(?:\.\w+)+)[`(]", text)
        found |= {name: str(page.relative_to(ROOT)) for name in names if name.startswith("vllm_weir.")}
    return {name: page for name, page in found.items() if name.removeprefix("vllm_weir.") not in OTHERS}


def resolve(name: str) -> Any:
    """The module, or what a module has, of a dotted name."""
    parts = name.split(".")
    found, left = importlib.import_module(parts[0]), parts[1:]
    for k, part in enumerate(left):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[: k + 2]))
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", sorted(documented()))
def test_names(name: str) -> None:
    assert resolve(name) is not None, documented()[name]


def test_what_the_reference_shows_has_docstrings() -> None:
    """The functions and classes, and their methods, which are shown with them."""
    pages_of_python = [page.read_text() for page in (REFERENCE / "python").rglob("*.md")]
    shown = {name: resolve(name) for text in pages_of_python for name in re.findall(r"^::: ([\w.]+)", text, re.M)}
    for name, one in list(shown.items()):
        if inspect.isclass(one):
            shown |= {f"{name}.{key}": value for key, value in vars(one).items() if inspect.isfunction(value)}
    public = {name: one for name, one in shown.items() if callable(one) and not name.split(".")[-1].startswith("_")}
    assert len(public) > 200
    assert [name for name, one in public.items() if not inspect.getdoc(one)] == []


def test_names_are_found_where_they_stand() -> None:
    found = documented()
    assert {f"vllm_weir.{name}" for name in ("params", "Capture", "demo.probe.fit_probe", "codec")} <= set(found)
    assert len(found) > 140


def rows(page: str, heading: str = "") -> list[list[str]]:
    """The code in the first cells of a page's tables, a list for each row; of the tables after a heading."""
    text = (REFERENCE / page).read_text()
    text = text[text.index(heading) :] if heading else text
    return [re.findall(r"`([^`]+)`", line.split("|")[1]) for line in text.splitlines() if line.startswith("| `")]


def routes_of(cells: list[list[str]]) -> set[tuple[str, str]]:
    """(method, path) of the first cells of the table of routes, where a path may have the methods before it."""
    found, path = set(), ""
    for cell in cells:
        methods: list[str] = []
        fresh = True
        for text in cell:
            method, _, named = text.partition(" ") if text[0].isupper() else ("", "", text)
            if method and fresh:
                methods = []
            methods += [method] if method else []
            fresh = bool(named)
            if named:
                path = re.sub(r"[^/]+$", "", path) + named.removeprefix(".../") if named.startswith("...") else named
                found |= {(one, path) for one in methods}
    return found


def test_routes() -> None:
    told = routes_of([cell for cell in rows("http.md") if re.match(r"[A-Z]+( /|$)", cell[0])])
    told -= {("POST", "/v1/completions"), ("POST", "/v1/chat/completions")}
    there = set()
    for module in load_route_modules():
        for route in module.router().routes:
            there |= {(method, re.sub(r":\w+}", "}", route.path)) for method in route.methods}
    assert len(told) > 25 and told - there == set()


def test_settings() -> None:
    told = [cell[0] for cell in rows("settings.md") if len(cell) == 1 and cell[0].islower() and " " not in cell[0]]
    assert set(Settings.model_fields) <= set(told)
    for page in pages():
        for name in re.findall(r"\bWEIR_[A-Z][A-Z_]*[A-Z]\b", page.read_text()):
            assert page == CHANGELOG or name in variables() or name in ("WEIR_SERVE", "WEIR_TEST_ENGINE"), (
                f"{page}: {name}"
            )


@cache
def told_commands() -> list[str]:
    """`weir NAME ...` in backticks, on any page."""
    texts = [page.read_text() for page in pages() if page != CHANGELOG]
    return sorted({found for text in texts for found in re.findall(r"`weir ([a-z][^`\n]*)`", text)})


@pytest.mark.parametrize("told", told_commands())
def test_commands(told: str) -> None:
    """The command is there, and has each option that is named with it."""
    command: Any = typer.main.get_command(app)
    words = told.split()
    while words and hasattr(command, "commands"):
        if words[0] not in command.commands:
            break
        command = command.commands[words.pop(0)]
    assert command.name != "root" and told.split()[0] in typer.main.get_command(app).commands, told  # type: ignore[attr-defined]
    if command.name == "serve":
        return  # its options are vLLM's, which tests/engine looks at
    options = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options, told


def test_hook_points_and_keys_of_a_request() -> None:
    table = (REFERENCE / "hook-points.md").read_text().split("## ")
    cells = [line.split("|")[1] for part in table[:4] for line in part.splitlines() if line.startswith("| `")]
    hooks = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert len(hooks) > 20 and [normalise_hook(name, "hook") for name in hooks] == hooks
    keys = {cell[0] for cell in rows("wire-form.md")[:10]}
    assert keys - {"v", "response"} <= {field.name for field in dataclasses.fields(RequestSpec)}


def test_formats() -> None:
    """Round trips are in `test_codec.py` and `storage/`; here, that each name is still taken."""
    text = (REFERENCE / "file-formats.md").read_text()
    for method in {cell[0] for cell in rows("file-formats.md")[:6]}:
        assert Compression.parse(method).method == method
    told = set(re.findall(r"\w+", " ".join(re.findall(r"^### (sharded|per_request and packed|npz)$", text, re.M)))) - {
        "and"
    }
    assert told == set(LAYOUTS)
    consumers = {one.name for one in importlib.metadata.entry_points(group="vllm_weir.consumers")}
    assert {"filesystem", "logging", "npz"} <= consumers


def test_an_option_that_is_gone_is_noticed() -> None:
    with pytest.raises(UsageError):
        typer.main.get_command(app).commands["bench"].make_context("bench", ["--gone"])  # type: ignore[attr-defined]
    with pytest.raises((ImportError, AttributeError)):
        resolve("vllm_weir.gone")
