"""README and docs without an engine: links, what source code says of them, and that every block can be read.

`tests/engine/test_docs.py` runs the blocks.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.support.markdown import (
    PATH_BASES,
    REASONS,
    ROOT,
    Block,
    anchors,
    blocks,
    commands,
    links,
    mentioned,
    pages,
    paths,
    prose,
    relative,
    split_environment,
)
from vllm_weir.cli.main import app
from vllm_weir.config.settings import OTHER_VARIABLES, Settings
from vllm_weir.server.limits import ServerLimits

PAGES = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages()]
BLOCKS = [block for page in pages() for block in blocks(page)]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LANGUAGES = {"python", "bash", "text", "json", "toml", "yaml"}
GENERATED = {"docs/models.md"}
NOT_IN_THE_REPOSITORY = {"bench/results/latest.json", "data/hidden_states", "out/", "out/demo/", "vllm-lens/", "weir/"}
"""What docs name in backticks that looks like a path: files that commands write, and prefixes of model names."""
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
UsageError: Any = typer.BadParameter.__mro__[1]
OTHERS = {"cd", "git", "grep", "inspect", "source", "vllm"}
"""Commands of others, whose words are not looked at here."""


def named(block: Block) -> str:
    return block.place


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    for line, target in links(page):
        if re.match(r"\w+:", target):
            continue
        path, anchor = relative(page, target)
        assert path.exists(), f"{page}:{line}: {target}"
        assert not path.is_dir() or page.parent == ROOT, f"{page}:{line}: {target} is a folder, which a site lacks"
        assert path.is_relative_to(ROOT), f"{page}:{line}: {target}"
        assert not anchor or anchor in anchors(path), f"{page}:{line}: no heading {anchor!r} in {path}"


def test_pages_that_source_code_names_exist() -> None:
    kinds = ("*.py", "*.js", "*.html", "*.toml", "*.yml")
    folders = ("src", "examples", "bench", "scripts", "tests")
    files = [path for folder in folders for kind in kinds for path in (ROOT / folder).rglob(kind)]
    files += [ROOT / "Makefile", ROOT / "mkdocs.yml", ROOT / "pyproject.toml"]
    found = [(path, name) for path in files for name in mentioned(path.read_text())]
    assert any(path.is_relative_to(ROOT / "src") for path, _ in found)
    for path, name in found:
        target, anchor = relative(ROOT / "README.md", name)
        assert target.exists(), f"{path} names {name}"
        assert not anchor or anchor in anchors(target), f"{path} names {name}"


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: Path) -> None:
    for line, name in paths(page):
        there = name in NOT_IN_THE_REPOSITORY or any((base / name).exists() for base in PATH_BASES)
        assert there, f"{page.relative_to(ROOT)}:{line}: `{name}` is neither in the repository nor in src/vllm_weir"


def test_paths_are_told_from_other_words(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`worker/gone.py`, `lost.py`, `serve/` and\n`tests/unit`; `/v1/x`, `a/b`, [`x.py`](x.py), `.py`\n")
    assert [*paths(page)] == [(1, "worker/gone.py"), (1, "lost.py"), (1, "serve/"), (2, "tests/unit")]


def test_every_page_is_in_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert str(page.relative_to(ROOT / "docs")) in nav, page


@pytest.mark.parametrize("page", PAGES)
def test_layout_that_every_reader_of_markdown_understands(page: Path) -> None:
    """Lists and tables stand after an empty line, and lines that are no table are short."""
    lines = prose(page).splitlines()
    for k, line in enumerate(lines[1:], 2):
        before = lines[k - 2]
        starts_list = re.match(r"([*-]|\d+\.) ", line) and before and not re.match(r"([*-]|\d+\.|\s) ?", before)
        starts_table = line.startswith("|") and before and not before.startswith("|")
        assert not starts_list and not starts_table, f"{page}:{k}: {line!r} needs an empty line before it"
    if str(page.relative_to(ROOT)) in GENERATED:
        return
    printed = {b.line + k for b in blocks(page) if b.language == "text" for k in range(b.text.count("\n"))}
    for k, line in enumerate(page.read_text().splitlines(), 1):
        free = (
            k in printed
            or line.lstrip().startswith(("|", "!", "#", "["))
            or re.search(r"https?://\S{40,}|\]\([^)]{40,}\)", line)
        )
        assert free or len(line) <= 100, f"{page}:{k}: {len(line)} characters"


def test_the_map_has_a_line_for_each_folder() -> None:
    table = (ROOT / "docs" / "structures.md").read_text()
    source = ROOT / "src" / "vllm_weir"
    named = set(re.findall(r"`([\w./]+)`", "".join(re.findall(r"^\| (`[^|]+) \|", table, re.M))))
    folders = {
        p.relative_to(source).as_posix() + "/" for p in source.rglob("*") if p.is_dir() and p.name != "__pycache__"
    }
    modules = {p.name for p in source.glob("*.py")}
    assert named == folders | modules


def test_glossary_is_sorted_and_used() -> None:
    glossary = ROOT / "docs" / "glossary.md"
    entries = re.findall(r"^\| ([^|]+?) \|", glossary.read_text(), re.M)[1:]
    assert entries == sorted(entries, key=str.lower)
    text = " ".join(" ".join(prose(page).split()).lower() for page in pages() if page != glossary)
    unused = [word for entry in entries for word in entry.split(", ") if not re.search(rf"\b{word}s?\b", text)]
    assert not unused, f"no page uses {', '.join(unused)}"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140


def test_blocks_are_of_known_kinds_and_say_why_they_do_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    for block in BLOCKS:
        assert block.language in LANGUAGES, f"{block.place}: language {block.language!r}"
        if block.note.startswith("not run"):
            assert block.not_run in REASONS, f"{block.place}: {block.note!r}; reasons are {', '.join(REASONS)}"
    with capsys.disabled():
        for reason, count in Counter(block.not_run for block in BLOCKS if block.not_run).items():
            print(f"\nblocks of README and docs that are not run: {count} ({reason}: {REASONS[reason]})")
    python = [block for block in BLOCKS if block.language == "python"]
    assert sum(bool(block.not_run) for block in python) <= len(python) / 10, "what is shown has to run"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=named)
def test_python_is_python(block: Block) -> None:
    compile(block.text, block.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert all(len(line) <= 100 for line in block.text.splitlines()), block.place


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in ("json", "toml")], ids=named)
def test_data_can_be_read(block: Block) -> None:
    (json if block.language == "json" else tomllib).loads(block.text)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "bash"], ids=named)
def test_commands_can_be_given(block: Block) -> None:
    found = commands(block.text)
    assert found, block.place
    for words in found:
        given, words = split_environment(words)
        given_names = {"MODEL", "PATH", "...", "weir/MODEL"} & set(words)
        typed = block.not_run or words[:1] not in (["weir"], ["vllm"], ["inspect"]) or not given_names
        assert typed, f"{block.place}: it cannot be pasted; use demo, or say why it is not run"
        for name in given:
            assert not name.startswith("WEIR_") or name in variables(), f"{block.place}: {name}"
        if words:
            check_command(words, block.place)


def variables() -> set[str]:
    """Weir's environment variables."""
    names = {*map(str.upper, Settings.model_fields), *OTHER_VARIABLES}
    return {f"WEIR_{name}" for name in names} | {f"WEIR_SERVE_{name.upper()}" for name in ServerLimits.model_fields}


def check_command(words: list[str], place: str) -> None:
    """Fail if a command names options, files or packages that there are not."""
    program, *rest = words
    if program == "weir":
        check_weir(rest, place)
    elif program == "make":
        assert {word for word in rest if "=" not in word} <= TARGETS, place
    elif program == "pip":
        assert rest[0] in ("install", "uninstall"), place
        for extras in re.findall(r"(?:vllm-weir|\.)\[([\w,]+)\]", " ".join(rest)):
            assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"]), f"{place}: [{extras}]"
    elif program in ("python", "python3", ".venv/bin/python"):
        check_python(rest, place)
    elif program == "curl":
        assert any(re.match(r"(https?://)?localhost:8000/", word) for word in rest), place
    else:
        assert program in OTHERS, f"{place}: {program}"


def check_weir(rest: list[str], place: str) -> None:
    """Parse a command line of `weir` without running it."""
    name, *options = rest
    command: Any = typer.main.get_command(app)
    command = command.commands[name]
    if name == "serve":  # its options are vLLM's, which tests/engine looks at
        return
    try:
        while hasattr(command, "commands") and options and options[0] in command.commands:
            command, options = command.commands[options[0]], options[1:]
        command.make_context(name, list(options))
    except UsageError as e:
        pytest.fail(f"{place}: weir {' '.join(rest)}: {e.format_message()}")


def check_python(rest: list[str], place: str) -> None:
    """The file or module exists and knows the options."""
    if rest[0] == "-m":
        path = ROOT / rest[1].replace(".", "/")
        assert rest[1] in ("pytest", "mkdocs") or path.with_suffix(".py").exists() or path.is_dir(), place
        return
    path = ROOT / rest[0]
    assert path.exists(), place
    for option in (word for word in rest[1:] if word.startswith("--")):
        assert f'"{option.partition("=")[0]}"' in path.read_text(), f"{place}: {option}"


def test_every_setting_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text()
    for name in Settings.model_fields:
        assert f"| `{name}` | `WEIR_{name.upper()}`" in page, name


def test_the_command_line_reference_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("docs_cli", ROOT / "scripts" / "docs_cli.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text() == script.page(), "run scripts/docs_cli.py"


def test_dependencies_have_lower_bounds() -> None:
    assert [one for one in PROJECT["project"]["dependencies"] if ">=" not in one] == []
