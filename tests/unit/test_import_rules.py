"""The layout's rules: imports go down, none go in a circle, and only `patches` and `guard` know vLLM's inside.

docs/explanation/architecture.md draws the floors. To add a package, give it a line in `FLOORS`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2] / "src" / "vllm_weir"
FLOORS = (
    {"plugin", "cli", "keep", "settings"},
    {"bench", "demo"},
    {"patches"},
    {"integrations"},
    {"compat"},
    {"server"},
    {"extraction", "streaming"},
    {"experiments"},
    {"api"},
    {"frontend"},
    {"controllers"},
    {"analysis"},
    {"storage", "client"},
    {"consumers", "transformers_points"},
    {"worker"},
    {"results"},
    {"codec", "core", "fitting", "lenses", "sae"},
    {"config"},
    {"guard"},
    {"schema"},
    {"messages", "util"},
    {"errors"},
)
"""From the top down. A file may import from its own package and from floors below."""
ENGINE = {
    "api", "client", "codec", "config", "consumers", "controllers", "core", "frontend", "guard", "messages", "patches",
    "lenses", "plugin", "results", "sae", "schema", "server", "transformers_points", "util", "worker",
}  # fmt: skip
"""Packages that do without what is built on them."""
BUILT_ON = {"analysis", "experiments", "extraction", "fitting", "storage", "streaming"}
INSIDE = {"core", "frontend", "patches", "server", "worker"}
"""Packages of which these import nothing but `weir.engine(llm)`, which is in `ENGINE_MODULE`."""
ENGINE_MODULE = "vllm_weir.frontend.engine"
PUBLIC = {"vllm", "vllm.inputs", "vllm.outputs", "vllm.platforms", "vllm.exceptions"}
"""Modules of vLLM that any package may import; all else of vLLM belongs to `patches` and `guard`."""


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("vllm_weir", cache_dir=None)


def test_every_package_has_a_floor():
    there = {p.stem for p in ROOT.glob("*.py") if p.stem != "__init__"}
    there |= {p.name for p in ROOT.iterdir() if (p / "__init__.py").exists()}
    named = [name for floor in FLOORS for name in floor]
    assert len(named) == len(set(named)) and set(named) == there


def test_imports_go_down(graph):
    floor = {f"vllm_weir.{name}": level for level, names in enumerate(FLOORS) for name in names}
    up = []
    for importer in graph.modules - {"vllm_weir"}:
        for imported in graph.find_modules_directly_imported_by(importer) - {"vllm_weir"}:
            a, b = (".".join(module.split(".")[:2]) for module in (importer, imported))
            if a != b and floor[a] >= floor[b]:
                up.append(f"{importer} -> {imported}")
    assert not up


def test_few_places_name_compat():
    """By text too: nothing that a request passes knows another system, so `compat` comes in where a table names it."""
    doors = {"__init__.py", "guard/outputs.py", "server/endpoint_plugin.py", "storage/loading.py"}
    above = {name for floor in FLOORS[: FLOORS.index({"compat"}) + 1] for name in floor}
    named = {path.relative_to(ROOT) for path in ROOT.rglob("*.py") if "vllm_weir.compat" in path.read_text()}
    assert {str(path) for path in named if path.parts[0].removesuffix(".py") not in above} == doors


def test_the_engine_does_without_what_is_built_on_it(graph):
    wrong = []
    for importer in graph.modules - {"vllm_weir"}:
        for imported in graph.find_modules_directly_imported_by(importer) - {"vllm_weir"}:
            a, b = (module.split(".")[1] for module in (importer, imported))
            if (a in ENGINE and b in BUILT_ON) or (a in BUILT_ON and b in INSIDE and imported != ENGINE_MODULE):
                wrong.append(f"{importer} -> {imported}")
    assert not wrong


def test_no_circles(graph):
    """`CycleError` names the modules of one."""
    TopologicalSorter({m: graph.find_modules_directly_imported_by(m) for m in graph.modules}).prepare()


def test_only_patches_and_guard_import_what_is_inside_vllm():
    inside = []
    for path in ROOT.rglob("*.py"):
        if path.is_relative_to(ROOT / "patches") or path.is_relative_to(ROOT / "guard"):
            continue
        for line, module in imported_modules(path):
            if (module == "vllm" or module.startswith("vllm.")) and module not in PUBLIC:
                inside.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not inside


def test_pure_packages_import_nothing_heavy():
    """`schema` and `core` are tested in milliseconds: neither torch nor vLLM comes with them."""
    heavy = []
    for package in ("schema", "core"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            found = [*modules_of(tree.body), *((n, m) for n, m in imported_modules(path) if m.startswith("vllm."))]
            heavy += [f"{path.name}:{n} imports {m}" for n, m in found if m.split(".")[0] in ("torch", "vllm")]
    assert not heavy


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Each import statement's line and module, inside functions too."""
    return modules_of(ast.walk(ast.parse(path.read_text())))


def modules_of(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module


def test_nothing_on_a_worker_is_set_from_outside():
    """What an object needs it is given when it is made: else objects know each other in circles that no import shows.

    Records (dataclasses, structs) may be filled by whoever makes them.
    """
    own, records = _attributes()
    found = []
    for path in sorted([*(ROOT / "worker").rglob("*.py"), *(ROOT / "patches").rglob("*.py")]):
        for target in _assigned(ast.parse(path.read_text())):
            owner = target.value
            root = owner
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(owner, ast.Name) and owner.id in {"self", "cls"}:
                continue
            part = isinstance(owner, ast.Attribute) and isinstance(root, ast.Name) and root.id in {"self", "runtime"}
            inside = path.is_relative_to(ROOT / "worker") and target.attr not in records
            if target.attr in own and (part or inside):
                found.append(f"{path.relative_to(ROOT)}:{target.lineno}: {ast.unparse(target)}")
    assert not found


def _attributes() -> tuple[set[str], set[str]]:
    """Return names of the attributes of classes of `worker`, and those of all records."""
    own: set[str] = set()
    records: set[str] = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            names = {x.target.id for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)}
            names |= {x.attr for x in _assigned(node) if isinstance(x.value, ast.Name) and x.value.id == "self"}
            described = " ".join(map(ast.unparse, [*node.decorator_list, *node.bases]))
            if re.search(r"\b(dataclass|Struct)\b", described):
                records |= names
            elif path.is_relative_to(ROOT / "worker"):
                own |= names
    return own, records


def _assigned(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that are assigned to anywhere in a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node
