"""Every name of vLLM that Weir imports, in functions too, is there in the vLLM that is installed."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.machine import module, needs

SRC = Path(__file__).resolve().parents[2] / "src/vllm_weir"
SPEC = importlib.util.find_spec("vllm")


def imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Module and name of each import from vLLM that has no alternative (`except ImportError`)."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Try):
            parts = [*child.body, *child.orelse, *child.finalbody] if not _has_alternative(child) else child.orelse
            for part in parts:
                yield from imports(ast.Module([part], []))
        elif isinstance(child, ast.ImportFrom) and not child.level and (child.module or "").split(".")[0] == "vllm":
            yield from ((child.module or "", alias.name) for alias in child.names)
        else:
            yield from imports(child)


def _has_alternative(node: ast.Try) -> bool:
    return any("ImportError" in ast.unparse(handler.type) for handler in node.handlers if handler.type is not None)


def file_of(name: str) -> Path | None:
    assert SPEC is not None and SPEC.submodule_search_locations
    path = Path(SPEC.submodule_search_locations[0]).parent.joinpath(*name.split("."))
    return next((found for found in (path.with_suffix(".py"), path / "__init__.py") if found.exists()), None)


@cache
def names(path: Path) -> set[str]:
    """What a module defines or imports, also under a condition, or names as a string (lazy imports)."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


@needs(module("vllm"))
def test_every_name_is_there() -> None:
    missing, count = [], 0
    for file in sorted(SRC.rglob("*.py")):
        for package, name in imports(ast.parse(file.read_text())):
            count += 1
            path = file_of(package)
            if file_of(f"{package}.{name}") is None and (path is None or name not in names(path)):
                missing.append(f"{file.relative_to(SRC)}: {package}.{name}")
    assert not missing and count > 50
