"""The site of the documentation: its navigation and pictures, what its search finds, and its list of pages."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("mkdocs")
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.structure.files import get_files
from mkdocs.structure.nav import get_navigation

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PICTURE = re.compile(r"!\[[^\]]+\]\(([^)]+)\)")
TYPED = {
    "clamp feature": "guides/sae",
    "clamp an SAE latent": "guides/sae",
    "set feature activation": "guides/sae",
    "layer too large": "errors/not-tapped",
    "block does not exist": "errors/not-tapped",
    "steer after </think>": "guides/chat-positions",
    "steer only the assistant": "guides/chat-positions",
    "save hidden states": "guides/capture",
    "attention weights of a head": "guides/attention",
    "stop generation when a probe fires": "guides/probes",
    "sklearn classifier": "guides/probes",
    "speculative decoding": "guides/engines",
    "tensor parallel": "guides/engines",
    "activation patching": "guides/sweep",
    "refusal direction": "guides/fit",
    "abliterate": "guides/fit",
    "conditional steering": "guides/gates",
    "register_forward_hook": "guides/hooks",
    "load gguf control vector": "guides/vectors",
    "gradient attribution": "guides/attribute",
    "logit lens": "guides/features",
    "max activating examples": "guides/feature-datasets",
    "out of memory": "errors/no-room",
    "shape mismatch": "errors/width",
    "plugin not loaded": "errors/refused-engine",
    "training dataloader": "guides/keep",
    "resume extraction": "guides/extract",
    "supported models": "models",
    "is Llama supported": "models",
    "environment variables": "reference/settings",
    "overhead throughput": "bench",
    "TransformerLens hook names": "reference/hook-points",
    "web interface sliders": "guides/page",
    "prefix caching": "explanation/prefix-cache",
}
"""What a reader types -> the page, without its ending."""


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def config() -> Any:
    """The site's, without the pages that are made of docstrings, which take long."""
    fields = load_config(str(ROOT / "mkdocs.yml")).plugins["material/search"].config["fields"]
    config = load_config(str(ROOT / "mkdocs.yml"), plugins=[{"search": {"fields": dict(fields)}}])
    config.plugins.on_startup(command="build", dirty=False)
    return config.plugins.on_config(config)


@pytest.fixture(scope="module")
def search(config: Any) -> Any:
    """The search index as the build makes it."""
    plugin = config.plugins["material/search"]
    config.plugins.on_pre_build(config=config)
    files = config.plugins.on_files(get_files(config), config=config)
    nav = get_navigation(files, config)
    for page in nav.pages:
        page.read_source(config)
        page.markdown = config.plugins.on_page_markdown(page.markdown, page=page, config=config, files=files)
        page.render(config, files)
        config.plugins.on_page_context({}, page=page, config=config, nav=nav)
    boosts = {name: field["boost"] for name, field in config.plugins["material/search"].config["fields"].items()}
    return script("docs_search").Search(plugin.search_index.entries, boosts)


@pytest.mark.parametrize("typed", TYPED)
def test_search_finds_the_page_by_the_words_people_type(search: Any, typed: str) -> None:
    found = search.pages(typed)[:3]
    assert f"{TYPED[typed]}.html" in found, found


@pytest.mark.thorough
def test_search_finds_them_among_what_docstrings_say(tmp_path: Path) -> None:
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    build(config)
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    boosts = {name: field["boost"] for name, field in index["config"]["fields"].items()}
    search = script("docs_search").Search(index["docs"], boosts)
    found = {typed: search.pages(typed)[:3] for typed in TYPED}
    assert {typed: pages for typed, pages in found.items() if f"{TYPED[typed]}.html" not in pages} == {}
    assert len((tmp_path / "llms.txt").read_text().splitlines()) > 80


def test_search_words_are_of_pages_that_are_there(config: Any) -> None:
    assert all((DOCS / page).exists() for page in config["extra"]["search_words"])


def leaves(nav: Any) -> Iterator[str]:
    for entry in nav:
        below = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from leaves(below) if isinstance(below, list) else [below]


def test_guides_are_in_six_groups_with_a_picture_each(config: Any) -> None:
    listed = [*leaves(config["nav"])]
    assert len(listed) == len(set(listed)), "a page stands once in the navigation"
    (groups,) = [entry["How-to guides"] for entry in config["nav"] if "How-to guides" in entry]
    assert len(groups) == 6
    for group in groups:
        ((title, pages),) = group.items()
        texts = [(DOCS / page).read_text() for page in leaves(pages)]
        assert any(map(PICTURE.search, texts)), f"{title} has no picture"
    assert PICTURE.search((DOCS / "index.md").read_text())


def test_every_picture_is_shown() -> None:
    shown = {Path(name).name for page in (*DOCS.rglob("*.md"), ROOT / "README.md") for name in
             PICTURE.findall(page.read_text())}  # fmt: skip
    notebooks = " ".join(path.read_text() for path in DOCS.rglob("*.ipynb"))
    unused = [path.name for path in (DOCS / "images").iterdir() if path.name not in shown]
    assert [name for name in unused if name not in notebooks] == []


def test_llms_txt_has_a_line_for_every_page(config: Any) -> None:
    texts = {str(path.relative_to(DOCS)): path.read_text() for path in DOCS.rglob("*.md")}
    lines = script("docs_hooks").llms(config["nav"], texts).splitlines()
    assert lines[0] == "# Weir" and lines[2].startswith("> ")
    entries = [re.fullmatch(r"- \[([^\]]+)\]\(([^)]+)\)(: .+)?", line) for line in lines if line.startswith("- ")]
    assert all(entries) and [entry[2] for entry in entries if entry] == [*leaves(config["nav"])]
    for entry in filter(None, entries):
        assert entry[3] or entry[2] not in texts or entry[2].startswith("reference/python/"), f"{entry[2]}: no sentence"
