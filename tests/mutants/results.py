"""What the last run of each fault gave: `results.json`, and the table in `README.md` made from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.mutants.table import Mutant

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).with_name("README.md")
HEAD = """# Seeded faults

Written by `make mutants`, which puts each fault into a copy of the source and runs the tests that reach it: one of them
has to fail, and has to pass without the fault. [Contributing](../../CONTRIBUTING.md#mutants) says how to add one.
"""


def read() -> dict[str, dict[str, Any]]:
    """By fault: `killed_by` (None: it survived), `how`, `tier`, `seconds`."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write(table: Mapping[str, Mutant], results: Mapping[str, Mapping[str, Any]]) -> None:
    """Store the results of the faults that are in the table, and the page."""
    kept = {name: results[name] for name in table if name in results}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(page(table, kept))


def page(table: Mapping[str, Mutant], results: Mapping[str, Mapping[str, Any]]) -> str:
    killed = sum(results.get(name, {}).get("killed_by") is not None for name in table)
    lines = [HEAD, f"{len(table)} faults, {killed} killed.", ""]
    area = None
    for name, mutant in table.items():
        if mutant.area != area:
            area = mutant.area
            lines += [f"## {area}", "", "| fault | what is wrong | killed by | tier |", "|---|---|---|---|"]
        lines.append(f"| {name} | {mutant.fault} (`{mutant.file}`) | {_killer(results.get(name))} |")
        if name == list(table)[-1] or _next(table, name).area != area:
            lines.append("")
    return "\n".join(lines)


def _next(table: Mapping[str, Mutant], name: str) -> Mutant:
    names = list(table)
    return table[names[names.index(name) + 1]]


def _killer(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "not run yet | "
    if result["killed_by"] is None:
        return "**survived** | "
    how = "" if result["how"] == "failed" else f" ({result['how']})"
    return f"`{result['killed_by'].replace('|', chr(92) + '|')}`{how} | {result['tier']}"
