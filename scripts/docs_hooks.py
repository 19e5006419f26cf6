"""MkDocs hooks: let pages link to files of the repository, as they do on a code host, and keep the site self-contained.

A page may link to any file of the repository by its relative path. Files outside ``docs/`` that pages link to become
part of the site: Markdown of the repository's root as pages, source code as pages with highlighting, the rest as it is.
A notebook becomes a page beside it, with its stored outputs. What readers type, `extra.search_words` of ``mkdocs.yml``,
is found by the search without standing on the page. ``llms.txt`` lists all pages for programs that read.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = {
    f"{name}.md": f"{name.lower()}.md" for name in ("CHANGELOG", "CODE_OF_CONDUCT", "CONTRIBUTING", "SECURITY")
}
CODE = {".py": "python", ".toml": "toml", ".js": "javascript", ".cff": "yaml", "": "text"}
"""Languages of files that are shown as pages, by suffix."""

_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.M | re.S)
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_COMMENT = re.compile(r"^<!--.*?-->\n", re.M | re.S)
_FOREIGN = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=["']?(?:https?:)?//[^>]*>""")

_llms: list[str] = []
_added: dict[str, str] = {}
"""Path in the repository -> path in the site's sources, of files outside ``docs/``."""


def on_files(files: Files, config: Any) -> Files:
    """Add the repository's files that pages link to."""
    _added.clear()
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        path = Path(file.abs_src_path)
        files.append(File.generated(config, file.src_uri.replace(".ipynb", ".md"), content=notebook_page(path)))
    pages = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    pages |= {name: (ROOT / name).read_text() for name in ROOT_PAGES}
    waiting = sorted({*ROOT_PAGES, *(target for page in pages for target in _targets(pages[page], page))})
    for target in waiting:
        if target.startswith("docs/") or target in _added:
            continue
        path = ROOT / target
        if not path.is_file():
            continue  # left as it is: MkDocs warns of the link
        if target in ROOT_PAGES or path.suffix not in (*CODE, ".md"):
            _added[target] = ROOT_PAGES.get(target, f"source/{target}")
            files.append(File.generated(config, _added[target], abs_src_path=str(path)))
        else:
            _added[target] = f"source/{target}.md"
            text = path.read_text()
            page = text if path.suffix == ".md" else f"# {target}\n\n~~~{CODE[path.suffix]}\n{text}~~~\n"
            files.append(File.generated(config, _added[target], content=page))
    return files


def notebook_page(path: Path) -> str:
    """Return a notebook as Markdown: its cells, what they printed, and a link to the notebook after the title."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            printed = "".join("".join(output.get("text", [])) for output in cell["outputs"]).rstrip()
            text = f"```python\n{text}\n```" + (f"\n\n```text\n{printed}\n```" if printed else "")
        parts.append(text)
    parts[0] += f"\n\nThis page is a notebook: [{path.name}]({path.name})."
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site; drop comments."""
    page.meta["tags"] = config["extra"]["search_words"].get(page.file.src_uri, [])
    if page.file.src_uri.startswith("source/"):
        page.meta["search"] = {"boost": 0.1}  # below the pages that link to it
    here = next((path for path, uri in _added.items() if uri == page.file.src_uri), f"docs/{page.file.src_uri}")

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), match[1]))
        uri = target.removeprefix("docs/") if target.startswith("docs/") else _added.get(target)
        if uri is None:
            return match[0]
        return posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".") + (match[2] or "")

    return _outside_fences(markdown, lambda text: _LINK.sub(link, _COMMENT.sub("", text)))


def on_nav(nav: Any, config: Any, files: Files) -> None:
    """Write the list of pages."""
    texts = {file.src_uri: file.content_string for file in files.documentation_pages()}
    _llms.append(llms(config["nav"], texts))


def llms(nav: Any, texts: Mapping[str, str], depth: int = 0) -> str:
    """The pages of a navigation, each with its title, its link and the first sentence of its text."""
    lines = ["# Weir", "", "> Read and steer the activations of language models served by stock vLLM.", ""] * (
        not depth
    )
    for entry in nav:
        ((title, below),) = entry.items() if isinstance(entry, dict) else [("Overview", entry)]
        if isinstance(below, list):
            lines += ["", f"{'#' * min(depth + 2, 4)} {title}", "", llms(below, texts, depth + 1)]
        else:
            lines.append(f"- [{title}]({below}){first_sentence(texts.get(below, ''))}")
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def first_sentence(text: str) -> str:
    """``: `` and the first sentence of a page's text, without links and marks; empty if it has none."""
    plain = _COMMENT.sub("", _FENCE.sub("", text))
    found = [one for one in plain.split("\n\n") if re.match(r"[A-Z`\[_\"]", one)]
    words = " ".join(re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", found[0] if found else "").split())
    sentence = re.match(r".{20,}?[.?](?= [A-Z`]|$)", words)
    return f": {(sentence[0] if sentence else words).rstrip(':')}" if words else ""


def on_post_build(config: Any) -> None:
    """Write ``llms.txt``; fail if a page would load anything from another host."""
    listed = re.sub(r"(?<=\]\()([^)]+)\.(md|ipynb)(?=\))", r"\1.html", _llms.pop())
    Path(config["site_dir"], "llms.txt").write_text(listed + "\n")
    for path in sorted(Path(config["site_dir"]).rglob("*.html")):
        found = [tag for tag in _FOREIGN.findall(path.read_text()) if 'rel="canonical"' not in tag]
        if found:
            raise PluginError(f"{os.path.relpath(path)} loads from another host: {found[0][:200]}")


def _targets(text: str, page: str) -> set[str]:
    found: set[str] = set()

    def collect(part: str) -> str:
        for match in _LINK.finditer(part):
            found.add(posixpath.normpath(posixpath.join(posixpath.dirname(page), match[1])))
        return part

    _outside_fences(text, collect)
    return found


def _outside_fences(text: str, change: Any) -> str:
    out, at = [], 0
    for fence in _FENCE.finditer(text):
        out += [change(text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*out, change(text[at:])])
