"""Notebooks as programs: their cells of code run in order, in one process, as Jupyter would run them.

Without a kernel, since a kernel adds sockets and an event loop, and nothing here needs them: ``python -m
tests.support.notebook PATH`` runs a notebook and prints JSON, what each cell printed; ``--write`` stores that in it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

_LOGGED = re.compile(r"(\(.*?\) )?(INFO|WARNING|ERROR) \d\d-\d\d ")
"""How lines of vLLM's log begin."""


class Cell(NamedTuple):
    """A cell: ``"code"`` or ``"markdown"``, its text, and the text stored as its output."""

    kind: str
    text: str
    printed: str


def read(path: Path) -> list[Cell]:
    """A notebook's cells, in order."""
    out = []
    for cell in json.loads(path.read_text())["cells"]:
        printed = "".join("".join(output.get("text", [])) for output in cell.get("outputs", []))
        out.append(Cell(cell["cell_type"], "".join(cell["source"]), printed))
    return out


def run(path: Path) -> list[str]:
    """Run the cells of code; return what each printed, without the log."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for k, cell in enumerate(cell for cell in read(path) if cell.kind == "code"):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(cell.text, f"{path.name}[{k}]", "exec"), names)
        lines = said.getvalue().splitlines(keepends=True)
        printed.append("".join(line for line in lines if not _LOGGED.match(line)))
    return printed


def write(path: Path, printed: list[str]) -> None:
    """Store what the cells of code printed."""
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for k, (cell, text) in enumerate(zip(code, printed, strict=True), 1):
        cell["execution_count"] = k
        cell["outputs"] = (
            [{"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}] if text else []
        )
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    printed = run(arguments.path)
    if arguments.write:
        write(arguments.path, printed)
    print("\n" + json.dumps(printed))


if __name__ == "__main__":
    main()
