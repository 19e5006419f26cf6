"""The table of docs/reference/shapes.md that says what a vector of each shape does with each kind of selector.

Every cell is worked out by the product: the request is admitted, planned and run by the CPU's tap, and what that did to
the rows is compared with all that it could have done. After a change, write the table anew:

    python -m tests.unit.schema.test_shapes_table
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import vllm_weir as weir
from tests.unit.schema.test_lowering import FACTS, LAYERS, Bench, D
from vllm_weir.compat.vllm_lens.request import to_weir
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.taps import tap_of

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "shapes.md"
BEGIN, END = "<!-- begin: tests/unit/schema/test_shapes_table.py -->\n\n", "\n<!-- end -->\n"
N, TOKENS = 4, 9
IDS = [7, 3, 7, 7, 3]
OPEN = ("all", "generated", "sampled", "2:", "::2", "-3:", {"token_ids": [7]})
COLUMNS: dict[str, list[tuple[Any, int]]] = {
    'any number: `"all"`, `"generated"`, `"sampled"`, `"2:"`, `{"token_ids": ...}`': [(at, 5) for at in OPEN],
    'n: a list of n, `"0:n"`, `"prompt"` of n tokens': [
        ([5, 1, 0, -1], 5), ("0:4", 5), ("-5:-1", 5), (":-1", 5), ("1:8:2", 5), ("prompt", 4),
    ],
    "another number of them": [([5, 1], 5), ([0, 1, 2, 3, 5], 5), ("0:3", 5), (":-1", 4), ("prompt", 5)],
    'one: `"last_prompt"`, `3`': [("last_prompt", 5), (3, 5), ([-1], 5), ("2:3", 5)],
}  # fmt: skip
"""How many positions are selected -> selectors, each with the prompt's length."""
ALL, EACH, TOGETHER = "one for all", "row k at the k-th", "all k, at each"
GIVEN, FIRST = "row k at the k-th as listed", "row k at position k"
REFUSALS = {
    "is open-ended: how many": "refused: open",
    f"{N} rows for": "refused: not n",
    f"activations hold {N} positions": "refused: not n",
    "expected one vector": "refused: one only",
}
LENS = "`SteeringVector`"


LISTS: list[list[tuple[Any, int]]] = [
    [(None, 5)], [([5, 1, 0, 7], 5)], [([5, 1], 5), ([0, 1, 2, 3, 5], 5)], [([3], 5)],
]  # fmt: skip
"""The same for vllm-lens's `position_indices`; None is the only one of any number."""


class Case(NamedTuple):
    """Vectors of one shape in one intervention.

    Attributes:
        build: (vectors, positions) -> ``extra_args``.
        value: the vectors as they are given.
        meant: layer -> [n, D], those that stand for it.
        change: (rows of the stream, vectors [1, D] or [n, D]) -> what the rows become.
        several: whether several vectors make one change.
    """

    name: str
    shape: str
    build: Callable[[Any, Any], dict[str, Any]]
    value: Any
    meant: dict[int, torch.Tensor]
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    several: bool = False


def clamped(h: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    u = v[0] / v[0].norm()
    return h + (2.0 - h @ u)[:, None] * u


def ablated(h: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    basis = torch.linalg.qr(v.T).Q
    return h - h @ basis @ basis.T


def low_rank(h: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return h + (h @ (2 * r).T + 1.0 - h @ r.T) @ r


KINDS = {
    "`Add`": (weir.Add, lambda h, v: h + v),
    "`Replace`": (weir.Replace, lambda h, v: v.expand_as(h)),
    "`Clamp`": (lambda v, **where: weir.Clamp(v, value=2.0, **where), clamped),
    "`Ablate`": (weir.Ablate, ablated),
}


def vectors(layer: int, count: int) -> torch.Tensor:
    """[count, D], different for each layer."""
    return torch.randn(count, D, generator=torch.Generator().manual_seed(10 * layer + count))


def wire(make: Callable[..., Any], **where: Any) -> Callable[[Any, Any], dict[str, Any]]:
    def build(value: Any, positions: Any) -> dict[str, Any]:
        item = make(value, positions=positions, **where)
        return {"weir": json.loads(json.dumps({"v": 1, "interventions": [item.to_json()]}))}

    return build


def cases() -> list[Case]:
    """All that the table has a row for."""
    out = []
    one, many = ({layer: vectors(layer, n) for layer in range(LAYERS)} for n in (1, N))
    for name, (make, change) in KINDS.items():
        several = name == "`Ablate`"
        n = "k" if several else "n"

        def add(shape, value, meant, _kind=(name, make, change, several), **where):
            kind, maker, changes, together = _kind
            out.append(Case(kind, shape, wire(maker, **where), value, meant, changes, together))

        add("[d]", one[1][0], {1: one[1]}, layers=1)
        add("[1, d]", one[1], {1: one[1]}, layers=1)
        add(f"[{n}, d]", many[1], {1: many[1]}, layers=1)
        add("{layer: [d] or [1, d]}", {0: one[0][0], 2: one[2]}, {0: one[0], 2: one[2]})
        add(f"{{layer: [{n}, d]}}", {0: many[0], 2: many[2]}, {0: many[0], 2: many[2]})
        add("`per_layer` [layers, d]", torch.cat(list(one.values())), one, per_layer=True)
        stack = torch.stack([many[2], many[0]])
        add(f"`per_layer` [layers, {n}, d]", stack, {0: many[0], 2: many[2]}, layers=[2, 0], per_layer=True)
    for shape, rows in (("R, W [d] or [1, d], b [1]", one[1]), ("R, W [k, d], b [k] or [1, k]", many[1])):
        bias = torch.ones(1, len(rows)) if len(rows) > 1 else torch.ones(1)
        given = rows[0] if len(rows) == 1 else rows
        make_low_rank = wire(lambda v, **where: weir.LowRank(*v, 1, **where))
        out.append(Case("`LowRank`", shape, make_low_rank, (given, 2 * rows, bias), {1: rows}, low_rank, True))
    for shape, stack, meant in (
        ("[layers, d]", torch.cat(list(one.values())), one),
        ("[layers, 1, d]", torch.stack(list(one.values())), one),
        ("[layers, n, d]", torch.stack(list(many.values())), many),
    ):
        out.append(Case(LENS, shape, lens, stack, meant, KINDS["`Add`"][1]))
    return out


def lens(activations: Any, positions: Any) -> dict[str, Any]:
    vector = weir.SteeringVector(activations, list(range(LAYERS)), position_indices=positions)
    return {"apply_steering_vectors": [vector.to_json()]}


def named(value: Any, names: dict[str, np.ndarray]) -> Any:
    """The same vectors by name; what the names stand for goes into `names`."""
    if isinstance(value, dict):
        return {layer: named(v, names) for layer, v in value.items()}
    if isinstance(value, tuple):
        return tuple(named(v, names) for v in value)
    name = f"v{len(names)}"
    names[name] = value.numpy()
    return name


def done(case: Case, value: Any, positions: Any, prompt_len: int, names: dict[str, np.ndarray]) -> str:
    """What the product does, in the table's words."""
    ids = IDS[:prompt_len]
    try:
        found = admit(to_weir(case.build(value, positions)), FACTS, lookup=lambda ref, _field: names[ref])
        bench = Bench()
        bench.enter("r", found, prompt_len, ids)
    except WeirError as e:
        (words,) = (words for part, words in REFUSALS.items() if part in e.message)
        return words
    (selector,) = {move.positions for move in found.effective}
    tokens = prompt_len if selector.needs_token_ids else TOKENS  # later ones are known to the device alone
    programs = bench.programs(["r"], [tokens], [0])
    every = np.arange(tokens)
    at = np.flatnonzero(selector.mask(every, prompt_len, np.array(ids) if selector.needs_token_ids else None))
    asked = Positions.parse("all" if positions is None else positions).mask(every, prompt_len, np.resize(ids, tokens))
    first = positions is None and len(at) < tokens
    assert at.tolist() == (every[:N] if first else np.flatnonzero(asked)).tolist()
    listed = np.array([p % prompt_len if p < 0 else p for p in positions]) if isinstance(positions, list) else at
    h = torch.randn(tokens, D, generator=torch.Generator().manual_seed(0))
    said = {what(case, layer, h, bench, programs, at, listed) for layer in range(LAYERS)} - {""}
    assert len(said) == 1
    return FIRST if first else said.pop()


def what(
    case: Case, layer: int, h: torch.Tensor, bench: Bench, programs: np.ndarray, at: np.ndarray, listed: np.ndarray
) -> str:
    """What was done at a layer; `at`: the positions that are selected, ascending, and `listed` as they were given."""
    got = bench.run(tap_of(Site("resid_post", layer)), programs, h, None)
    still = np.setdiff1d(np.arange(len(h)), at) if layer in case.meant else np.arange(len(h))
    assert torch.equal(got[still], h[still])
    if layer not in case.meant:
        return ""
    rows = case.meant[layer]
    could = {ALL: case.change(h[at], rows[:1])}
    if len(rows) > 1 and len(rows) == len(at):
        each = [rows[k : k + 1] for k in range(len(rows))]
        could[EACH] = torch.cat([case.change(h[p : p + 1], row) for p, row in zip(at, each, strict=True)])
        if (at != listed).any():
            order = np.argsort(listed)
            could[GIVEN] = torch.cat([case.change(h[p : p + 1], each[k]) for p, k in zip(at, order, strict=True)])
    if len(rows) > 1 and case.several:
        could[TOGETHER] = case.change(h[at], rows)
    (words,) = (words for words, changed in could.items() if torch.allclose(got[at], changed, atol=1e-4))
    return words


def cells(case: Case) -> list[str]:
    """One for each column, the same for all of its selectors, and for vectors by name."""
    out = []
    for selectors in LISTS if case.name == LENS else COLUMNS.values():
        names: dict[str, np.ndarray] = {}
        said = {done(case, case.value, *where, names) for where in selectors}
        if case.name != LENS:
            said.add(done(case, named(case.value, names), *selectors[0], names))
        assert len(said) == 1, (case.name, case.shape, selectors, said)
        out.append(said.pop())
    if max(map(len, case.meant.values())) == 1:
        assert set(out) == {ALL}, "one vector is for all positions, whatever selects them"
    return out


def table() -> str:
    """The table; interventions that do the same have one row, and so have shapes."""
    by_shape: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for case in cases():
        by_shape.setdefault((case.shape, tuple(cells(case))), []).append(case.name)
    rows: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for (shape, said), names in by_shape.items():
        rows.setdefault((tuple(names), said), []).append(shape)
    lines = [f"| intervention | vector | {' | '.join(COLUMNS)} |", "|---|---" + "|---" * len(COLUMNS) + "|"]
    for (names, said), shapes in rows.items():
        lines.append(f"| {', '.join(names)} | {'; '.join(shapes)} | {' | '.join(said)} |")
    return "\n".join(lines) + "\n"


def test_the_table_says_what_is_done():
    text = PAGE.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    assert text.split(BEGIN)[1].split(END)[0] == table(), "python -m tests.unit.schema.test_shapes_table writes it anew"


if __name__ == "__main__":
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END, 1)[1], encoding="utf-8")
