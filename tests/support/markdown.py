"""README and docs as data: pages, their links and headings, and the blocks of code in them.

A comment in the line above a block says how tests take it:

* ``<!-- not run: REASON -->``: it is only parsed, because of one of `REASONS`.
* ``<!-- output -->``: it is what the block before it prints; numbers may differ in their last digits.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PATH_BASES = (ROOT, ROOT / "src" / "vllm_weir")
"""Folders that paths in prose are relative to."""
REASONS = {
    "GPU": "needs a CUDA device",
    "not shipped": "needs a model, data or a sink that does not come with Weir",
    "object store": "needs a bucket",
    "second process": "needs another process at its other end; a test starts both",
    "takes long": "takes minutes; another test runs the same code",
}
_FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>```+)(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)(?P=ticks)[ ]*$", re.M | re.S
)
_NOTE = re.compile(r"<!-- *([^\n]*?) *-->\s*\Z")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_LINK_TEXT = re.compile(r"\[[^\]]*\](?=\()")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*$", re.M)
_OPERATORS = ("&&", "||", "|", ";", "&")


class Block(NamedTuple):
    """A fenced block of code.

    Attributes:
        line: number of its first line of code.
        note: what the comment above it says, or "".
    """

    page: Path
    line: int
    language: str
    text: str
    note: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def not_run(self) -> str:
        """Why tests do not run it, or ""."""
        return self.note.removeprefix("not run:").strip() if self.note.startswith("not run:") else ""


@cache
def pages() -> tuple[Path, ...]:
    """Every Markdown page that users read."""
    root = [
        path
        for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
        if (path := ROOT / name).exists()
    ]
    return (*root, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md")))


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """A page's blocks of code, in order."""
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        note = _NOTE.search(text[: match.start()])
        line = text.count("\n", 0, match.start("text")) + 1
        indent = len(match["indent"])
        code = "".join(one[indent:] for one in match["text"].splitlines(keepends=True))
        found.append(Block(page, line, match["language"], code, note[1] if note else ""))
    return tuple(found)


def prose(page: Path) -> str:
    """A page's text without its blocks of code, which leave empty lines, and without code in a line."""
    text = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text())
    return re.sub(r"`[^`\n]*`", lambda match: "`" * len(match[0]), text)


def links(page: Path) -> Iterator[tuple[int, str]]:
    """(line, target) of a page's links and pictures."""
    text = prose(page)
    for match in _LINK.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match[1]


def paths(page: Path) -> Iterator[tuple[int, str]]:
    """(line, path) of what a page's prose names in backticks as a file or folder of the repository.

    That is what ends in ``.py`` or a slash, or begins with a folder of the repository or of the package. The text of a
    link is left out: `links` has its target.
    """
    text = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text())
    text = _LINK_TEXT.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in re.finditer(r"`([\w./-]+)`", text):
        name = match[1]
        known = "/" in name and any((base / name.partition("/")[0]).is_dir() for base in PATH_BASES)
        if not name.startswith("/") and name != ".py" and (known or name.endswith((".py", "/"))):
            yield text.count("\n", 0, match.start()) + 1, name


@cache
def anchors(page: Path) -> frozenset[str]:
    """What a link into a page may name: its headings as code hosts and MkDocs write them, where these agree."""
    text = _FENCE.sub("", page.read_text())
    return frozenset(slug for title in _HEADING.findall(text) if (slug := _slug(title)) == re.sub("-+", "-", slug))


def _slug(title: str) -> str:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
    return re.sub(r"[^\w\- ]", "", plain).strip().lower().replace(" ", "-")


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block, each as its words; operators between commands are dropped.

    Raises:
        ValueError: for quotes that do not match.
    """
    out: list[list[str]] = []
    for line in _lines(text):
        words: list[str] = []
        for word in shlex.split(line):
            if word in _OPERATORS:
                out.append(words)
                words = []
            else:
                words.append(word)
        out.append(words)
    return [words for words in out if words]


def _lines(text: str) -> Iterator[str]:
    """Lines as a shell sees them: joined where a backslash or a quote goes over a line's end, without comments."""
    line, quote, k = "", "", 0
    while k < len(text):
        c = text[k]
        if c == "\\" and quote != "'":
            line += "" if text[k + 1 : k + 2] == "\n" else text[k : k + 2]
            k += 2
            continue
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        elif c == "#" and (not line or line[-1].isspace()):
            end = text.find("\n", k)
            k = len(text) if end < 0 else end
            continue
        elif c == "\n":
            yield line
            line = ""
            k += 1
            continue
        line += c
        k += 1
    if quote:
        raise ValueError(f"a quote {quote} is not closed")
    yield line


def split_environment(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Assignments in front of a command, and the command."""
    given: dict[str, str] = {}
    while words and re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words[0].partition("=")
        given[name] = value
        words = words[1:]
    return given, words


def mentioned(text: str) -> list[str]:
    """Pages below ``docs/`` that a text names, with what it names in them."""
    return re.findall(r"docs/[\w./-]*?\.md(?:#[\w-]+)?", text)


def relative(page: Path, target: str) -> tuple[Path, str]:
    """(file, anchor) that a link of a page leads to."""
    path, _, anchor = target.partition("#")
    return (Path(os.path.normpath(page.parent / path)) if path else page), anchor
