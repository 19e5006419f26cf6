"""Notebooks without an engine: their form, and the pages that the site makes of them."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.support.notebook import read

pytest.importorskip("mkdocs")
ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "scripts" / "docs_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_form(path):
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert path.stat().st_size < 30_000, "outputs are short texts; pictures are files"
    for cell in read(path):
        if cell.kind == "code":
            ast.parse(cell.text)
        assert all(len(line) <= 100 for line in cell.text.splitlines()), cell.text
    for cell in notebook["cells"]:
        assert all(output["output_type"] == "stream" for output in cell.get("outputs", []))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_links_and_pictures_are_there(path):
    text = "\n".join(cell.text for cell in read(path) if cell.kind == "markdown")
    found = re.findall(r"\]\(([^)#\s]+)", text)
    assert found
    for target in found:
        assert re.match(r"https?:", target) or (path.parent / target).exists(), target


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_site_has_a_page_of_it(path, hooks):
    assert f"notebooks/{path.stem}.md" in (ROOT / "mkdocs.yml").read_text()
    page = hooks.notebook_page(path)
    assert page.startswith("# ") and f"]({path.name})" in page
    for cell in read(path):
        assert cell.text in page and cell.printed.strip() in page
