"""Count the classes that hold what a request asks, and the files that know a field of a request.

    python scripts/forms.py [--list]

Fails where a count is above its bound, so that neither grows unnoticed; a change that lowers one lowers its bound.

Which classes hold a request is computed, so that no new one escapes. In the rooms through which a request passes
(`ROOMS`), a class holds request data if

* a field is a selector of positions: annotated `Positions`, or called ``positions`` and not yet parsed (``Any``); or
* a field, or an argument of ``__init__`` that is annotated, has the type of such a class, alone or in a sequence; or
* its base does.

A mapping is no such field: what maps ids or sites to requests is a registry of requests, and stands for none.

A file knows a field if the field's name occurs in its code as a name, an attribute, an argument, a key or the text of
a constant; docstrings and comments do not count.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "vllm_weir"
ROOMS = ("schema", "frontend", "worker")
MAX_CLASSES = 53
MAX_FILES = {"tag": 9, "dose": 19, "stop_when": 13, "compress": 25}
"""Field of a request -> files of `SRC` that may know it; for `tag`, one that means an HTML tag."""
_MAPPING = re.compile(r"\b(dict|Mapping|Callable|LruCache|type)\[")


def fields_of(kind: ast.ClassDef) -> dict[str, str]:
    """Return the fields of a class and the annotated arguments of its ``__init__``: name -> annotation."""
    found: dict[str, str] = {}
    for node in kind.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = ast.unparse(node.annotation)
        elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            found |= {one.arg: ast.unparse(one.annotation) for one in arguments if one.annotation is not None}
    return {name: text for name, text in found.items() if "ClassVar" not in text}


def request_classes(trees: dict[str, ast.Module]) -> dict[str, str]:
    """Return the classes that hold request data, by the rule above: name -> file."""
    kinds = {
        node.name: (file, fields_of(node), {ast.unparse(base) for base in node.bases})
        for file, tree in trees.items()
        if file.split("/")[0] in ROOMS
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name != "Positions"
    }
    found = {"Positions"}
    while True:
        more = {
            name
            for name, (_, fields, bases) in kinds.items()
            if name not in found
            and (bases & found or fields.get("positions") == "Any" or any(map(_names(found), fields.values())))
        }
        if not more:
            return {name: kinds[name][0] for name in sorted(found - {"Positions"})}
        found |= more


def _names(kinds: set[str]) -> Callable[[str], bool]:
    return lambda annotation: not _MAPPING.search(annotation) and not kinds.isdisjoint(re.findall(r"\w+", annotation))


def knows(tree: ast.Module, field: str) -> bool:
    """Return whether code names a field."""
    return field in set(_words(tree))


def _words(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, (ast.arg, ast.keyword)):
            yield node.arg or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def parsed(src: Path = SRC) -> dict[str, ast.Module]:
    """Return the parsed files of the package, by their paths in it."""
    return {path.relative_to(src).as_posix(): ast.parse(path.read_text()) for path in sorted(src.rglob("*.py"))}


def main() -> int:
    """Print both counts; return 1 if one is above its bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the classes and files")
    listed = parser.parse_args().list
    trees = parsed()
    classes = request_classes(trees)
    counts = [("classes that hold a request", MAX_CLASSES, [f"{file}: {name}" for name, file in classes.items()])]
    for field, most in MAX_FILES.items():
        counts.append((f"files that know {field}", most, [file for file, tree in trees.items() if knows(tree, field)]))
    for what, most, found in counts:
        print(f"{what}: {len(found)} (at most {most})")
        if listed or len(found) > most:
            print(*(f"    {one}" for one in sorted(found)), sep="\n")
    return int(any(len(found) > most for _, most, found in counts))


if __name__ == "__main__":
    sys.exit(main())
