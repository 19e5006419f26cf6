#!/usr/bin/env python3
"""Check Weir's table of patch points against the source of a vLLM that is not installed.

    pip download --no-deps vllm==0.33.0 && unzip -q vllm-0.33.0*.whl -d src033
    python scripts/check_patch_points.py src033 [more folders that hold a vllm/ package]

Prints one line per folder; the exit code is 1 if a patch point is missing or has lost a parameter.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from vllm_weir.patches.registry import PATCHES, Patch


def main(folders: list[str]) -> int:
    """Check every folder; return the exit code."""
    failed = False
    for folder in folders:
        problems = [f"{patch.path}: {why}" for patch in PATCHES if (why := check(Path(folder), patch))]
        failed |= bool(problems)
        found = len(PATCHES) - len(problems)
        print(f"{folder}: {found} of {len(PATCHES)} patch points as expected", *problems, sep="\n  ")
    return int(failed)


def check(root: Path, patch: Patch) -> str:
    """Return what is wrong with a patch point in the source below `root`; empty if nothing is."""
    path = root / (patch.module.replace(".", "/") + ".py")
    if not path.exists():
        return "" if patch.recent else "the module does not exist"
    owner, _, name = patch.name.rpartition(".")
    function = find(root, path, owner, name)
    if function is None:
        return "not found"
    arguments = function.args
    names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    missing = set(patch.needs) - names
    return f"no parameter {', '.join(sorted(missing))}" if missing else ""


def find(root: Path, path: Path, owner: str, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the definition of `name` in class `owner` or its bases, or at module level."""
    tree = ast.parse(path.read_text())
    scope = tree.body
    if owner:
        owner_class = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == owner), None)
        if owner_class is None:
            return None
        scope = owner_class.body
    for node in scope:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            return node
    for base in owner_class.bases if owner else ():
        base_name = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(base_name, ast.Name):
            base_path = imported_from(root, tree, base_name.id) or path
            found = find(root, base_path, base_name.id, name) if base_path.exists() else None
            if found is not None:
                return found
    return None


def imported_from(root: Path, tree: ast.Module, name: str) -> Path | None:
    """Return the file that `name` is imported from, or None if it is not imported."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and any((a.asname or a.name) == name for a in node.names):
            return root / (node.module.replace(".", "/") + ".py")
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
