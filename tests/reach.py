"""Which test files a change reaches, by the graph of imports.

A test file is reached if it has changed, or a module that it imports has: directly, through others, by a lazy name of
`vllm_weir`, or, where it starts engines, through what vLLM loads as Weir's plugins. A change to something that no graph
has (the environment, conftest files, data) reaches everything.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "vllm_weir"
ENGINE_FOLDERS = ("tests/engine/", "tests/traps/", "tests/conformance/")
LOADED_BY_NAME = ("plugin", "patches", "guard", "server", "worker")
"""Packages that come into vLLM's processes by entry points and by the table of patches."""
READ_BY_TESTS_ALONE = (".md", ".png", ".svg", ".yml", ".ipynb", ".txt")


def changed_since(commit: str | None) -> list[str] | None:
    """Return the files, relative to the repository, that differ from a commit; None if nobody can tell."""
    if commit is None:
        return None
    done = subprocess.run(["git", "diff", "--name-only", commit], cwd=ROOT, capture_output=True, text=True)
    return None if done.returncode else done.stdout.splitlines()


def reached_tests(changed: Iterable[str] | None) -> list[str]:
    """Return the test files that the changed files reach, relative to the repository; None reaches all."""
    tests = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").rglob("test_*.py") if "gpu" not in p.parts)
    if changed is None:
        return tests
    changed = set(changed)
    modules = {module_of(f) for f in changed if f.endswith(".py") and f.startswith(("src/", "tests/"))}
    unknown = {f for f in changed if not (f.endswith((".py", *READ_BY_TESTS_ALONE)) or f.startswith("bench/results/"))}
    unknown |= {f for f in changed if f.endswith("conftest.py") or f.startswith("scripts/constraints/")}
    if unknown - {"tests/durations.json"}:
        return tests
    others = {f for f in changed if not f.startswith(("src/", "tests/"))}
    return [t for t in tests if t in changed or modules & closure(t) or _reads(t, others)]


def _reads(test: str, files: set[str]) -> bool:
    """Whether a test reads documentation, examples, benchmarks or scripts that have changed."""
    named = {"docs/": "docs", "README": "docs", "examples/": "example", "bench/": "bench", "scripts/": "script"}
    return any(word in test for f in files for start, word in named.items() if f.startswith(start))


def module_of(file: str) -> str:
    """Return the dotted name of a file of src/ or tests/."""
    parts = Path(file).with_suffix("").parts
    parts = parts[1:] if parts[0] == "src" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def closure(test: str) -> frozenset[str]:
    """Return all modules of Weir and of the tests that a test file imports."""
    found: set[str] = set()
    waiting = [module_of(test)]
    if test.startswith(ENGINE_FOLDERS):
        waiting += loaded_by_name()
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += of_tests(module) if module.startswith("tests") else of_package(module)
    return frozenset(found)


@cache
def of_tests(module: str) -> list[str]:
    """Return what a module of the tests imports, and the modules of the lazy names that it reads of `weir`."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.exists():
        return []
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "weir":
            found.append(lazy_names().get(node.attr, PACKAGE))
    return [name for name in found if name.partition(".")[0] in ("tests", PACKAGE)]


@cache
def of_package(module: str) -> list[str]:
    """Return what a module of Weir imports."""
    if module not in graph().modules:
        return []
    return sorted(graph().find_modules_directly_imported_by(module))


@cache
def loaded_by_name() -> list[str]:
    """Return the modules that an engine loads without an import that the graph has."""
    roots = [f"{PACKAGE}.{name}" for name in LOADED_BY_NAME]
    return [*roots, *(found for root in roots for found in graph().find_descendants(root))]


@cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(PACKAGE, exclude_type_checking_imports=True)


@cache
def lazy_names() -> dict[str, str]:
    """Return the module of each name that `vllm_weir` imports on first use."""
    tree = ast.parse((ROOT / "src" / PACKAGE / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: node.module for node in imports for alias in node.names}
