"""Heads and neurons of captures and interventions: fields, vectors, and the instructions that they become."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vllm_weir as weir
from tests.support.parts import apply_to_rows
from tests.unit.refusals import pairs, refused
from vllm_weir.core.cache_keys import CacheKeys
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.engine_wire import _count_programs
from vllm_weir.schema.capture import describe_rows, in_words
from vllm_weir.schema.engine_traits import TableSizes
from vllm_weir.schema.hooks import HEAD_HOOKS, HOOKS, NEURON_HOOKS, READ_ONLY_HOOKS, Site
from vllm_weir.schema.instructions import (
    AFFINE,
    BLEND,
    CLAMP,
    CONST,
    KEEP_NORM,
    NORM,
    Instruction,
    LoweredIntervention,
    ResolvedIntervention,
    couples,
    reach,
)
from vllm_weir.schema.request import RequestSpec
from vllm_weir.schema.taps import STAGES, num_taps, tap_of
from vllm_weir.worker.planning.planner import Planner
from vllm_weir.worker.steering.programs import ActiveIntervention, ProgramTable
from vllm_weir.worker.tap import cpu_kernel
from vllm_weir.worker.tap.op import numbered

HEADS, D_HEAD, D_MLP, D = 4, 3, 10, 6
SHAPES = {"z": (HEADS, D_HEAD), "mlp_post": (D_MLP,), "resid_post": (D,)}
FORMS = [3, [3], (3,), range(3, 4), np.array([3]), torch.tensor([3]), torch.tensor(3), np.int64(3)]


ALL = weir.Add(torch.ones(1)).positions


def unknown(ref: str, field: str) -> np.ndarray:
    raise AssertionError(field)


# Fields.


@pytest.mark.parametrize(("name", "hook"), [("heads", "z"), ("neurons", "mlp_post")])
def test_every_form_of_a_list(name, hook):
    for picked, read in (*((form, (3,)) for form in FORMS), ([3, 0, 2], (3, 0, 2)), (range(9, 3, -3), (9, 6))):
        capture = weir.Capture(hook, 1, **{name: picked})
        add = weir.Add(torch.ones(len(read)) if name == "neurons" else head(1), 1, hook=hook, **{name: picked})
        assert getattr(capture, name) == getattr(add, name) == read, "in the order given"
        for item, back in (
            (capture, weir.Capture.from_json(json.loads(json.dumps(capture.to_json())))),
            (add, RequestSpec.parse(RequestSpec((), (add,)).to_json()).interventions[0]),
        ):
            assert back.to_json() == item.to_json() and item.to_json()[name] == list(read)
            assert getattr(back, name) == read


def test_what_is_left_out_is_not_written():
    assert not {"heads", "neurons"} & weir.Capture("z", 1).to_json().keys()
    assert not {"heads", "neurons"} & weir.Add(torch.ones(2), 1).to_json().keys()


WRONG = {
    "an empty list picks nothing; list some, or leave NAME out": [[]],
    "ONE 1 is listed twice": [[1, 2, 1]],
    "ONE -1 does not exist: NAME count from 0": [[0, -1], -1],
    "expected an int, got float": [[1.0], np.array([1.0])],
    "expected an int, got bool": [[True]],
    "NAME is an int or a list of ints, got (bool|str|set|Tensor)": [True, "all", {1}, torch.ones(2, 2)],
    "more than the limit of 65536": [range(10**9)],
    "ONE .* does not exist": [[10**5000]],
}


@pytest.mark.parametrize(("name", "hook"), [("heads", "q"), ("neurons", "mlp_post")])
def test_wrong_lists_are_refused_with_the_field(name, hook):
    for why, wrong in pairs(WRONG):
        for make in (weir.Capture, lambda hook, layers, **more: weir.Add(torch.ones(4), layers, hook=hook, **more)):
            with refused(f"x.{name}", why.replace("NAME", name).replace("ONE", name[:-1])) as e:
                make(hook, 1, path="x", **{name: wrong})
            assert len(e.value.message) < 200


@pytest.mark.parametrize(("name", "hooks"), [("heads", HEAD_HOOKS), ("neurons", NEURON_HOOKS)])
def test_parts_are_of_hook_points_that_have_them(name, hooks):
    for hook in hooks:
        weir.Capture(hook, **{name: [0]})
    for hook in set(HOOKS) - set(hooks):
        with refused(f"capture.{name}", f"{hook} has no {name}: leave {name} out"):
            weir.Capture(hook, **{name: [0]})


@pytest.mark.parametrize(
    ("capture", "shape", "why"),
    [
        (weir.Capture("k", 1, heads=[0, 2], path="x"), (2, 8), "head 2 does not exist: k has heads 0..1"),
        (weir.Capture("pattern", 1, heads=4, path="x"), (4, 99), "head 4 does not exist: pattern has heads 0..3"),
        (weir.Capture("mlp_pre", 1, neurons=[9, 10], path="x"), (10,), "neuron 10 .*: mlp_pre has neurons 0..9"),
    ],
)
def test_what_a_row_does_not_have(capture, shape, why):
    with refused("x.neurons" if capture.hook == "mlp_pre" else "x.heads", why):
        capture.check_shape(shape)
    capture.check_shape((shape[0] + 1, *shape[1:]))


def test_rows_are_compressed_whole():
    with refused("capture.compress", "leave compress out, or heads"):
        weir.Capture("z", 1, heads=[1], compress="rp8")


def test_notes_say_which():
    note = describe_rows(weir.Capture("z", 1, heads=[3, 1]))
    assert note == {"hook": "z", "layers": [1], "heads": [3, 1]} and in_words(note) == "z[1]: only heads 3, 1"
    note = describe_rows(weir.Capture("mlp_post", 1, "last_prompt", neurons=range(65)))
    assert note["neurons"] == "65 listed ones"
    assert in_words(note) == "mlp_post[1]: only positions 'last_prompt'; only neurons 65 listed ones"


@pytest.mark.parametrize("hook", READ_ONLY_HOOKS)
def test_what_cannot_be_changed(hook):
    """Refused in a sentence that says what to change instead."""
    weir.Capture(hook)
    one = torch.ones(4)
    for kind, vectors in (
        (weir.Add, [one]), (weir.Replace, [one]), (weir.Ablate, [one]), (weir.LowRank, [one, one, [1.0]]),
        (lambda v, *at, **more: weir.Clamp(v, *at, value=0.0, **more), [one]),
    ):  # fmt: skip
        with refused("x.hook", f"{hook} can be captured but not changed: .*change "):
            kind(*vectors, 1, hook=hook, path="x")


@pytest.mark.parametrize("flag", ["norm_match", "keep_norm"])
def test_the_norm_of_neurons(flag):
    with refused(f"intervention.{flag}", f"leave {flag} out"):
        weir.Add(torch.ones(2), 1, hook="mlp_post", neurons=[1, 2], **{flag: True})


# Vectors and instructions.


def apply(lowered: LoweredIntervention, h: np.ndarray, hook: str = "z") -> np.ndarray:
    """Rows under the instructions, by way of the wire and the CPU's tap; row k is the k-th selected position."""
    move = ResolvedIntervention(hook, (1,), ALL, lowered.per_position, lowered.instructions)
    move = ResolvedIntervention.from_wire(json.loads(json.dumps(move.to_wire())))
    assert (move.per_position, move.instructions) == (lowered.per_position, lowered.instructions)
    tap, taps = tap_of(Site(hook, 1)), num_taps(2)
    table = ProgramTable(TableSizes(64, 8, 256), taps, [tap], D, {tap: h.shape[1]})
    table.hold_vectors(lowered.rows, lambda digests: {digest: lowered.rows[digest] for digest in digests})
    plan = torch.zeros(len(h), 4, dtype=torch.int32)
    for k in range(len(h)):
        active = ActiveIntervention(move, move.digest, k if move.per_position else -1)
        plan[k] = torch.tensor([-1, -1, table.hold([active])[1], 0])
    tables = [torch.from_numpy(getattr(table, name)) for name in ("heads", "ints", "floats", "vectors")]
    rows, ranks = torch.from_numpy(h.astype(np.float32)), torch.full((1, taps * STAGES), -1, dtype=torch.int32)
    cpu_kernel.launch(rows, None, numbered(tap), plan, ranks, torch.zeros(1, D), *tables)
    return rows.numpy()


numbers = st.integers(-12, 12).map(lambda n: n / 4)


@st.composite
def parted(draw):
    """An intervention on heads, on neurons, or on whole rows with heads."""
    hook = draw(st.sampled_from(["z", "z", "mlp_post"]))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    picked, units = {}, [(HEADS, D_HEAD), (HEADS * D_HEAD,)]
    if hook == "mlp_post":
        neurons = draw(st.lists(st.integers(0, D_MLP - 1), min_size=1, max_size=6, unique=True))
        picked, units = {"neurons": neurons}, [(len(neurons),)]
    elif draw(st.booleans()):
        heads = draw(st.lists(st.integers(0, HEADS - 1), min_size=1, max_size=HEADS, unique=True))
        picked, units = {"heads": heads}, [(D_HEAD,), (1, D_HEAD), (len(heads), D_HEAD)]
    unit = draw(st.sampled_from(units))
    each_head = "heads" in picked and len(unit) == 2
    where = {"layers": 1, "hook": hook, **picked}
    kind = draw(st.sampled_from(["add", "ablate", "clamp", "replace", "low rank"]))
    # [m, d_head] for m heads can be read in two ways: an axis in front of it leaves one of them.
    front = (1,) if each_head else ()
    if kind in ("add", "replace"):
        n = draw(st.sampled_from([None, 2, 3]))
        if n is not None:
            where["positions"] = list(range(n))
            front = (n,)
            if "heads" in picked and not each_head:
                unit = (1, D_HEAD)
        vector = normal(*front, *unit)
        if kind == "replace":
            return weir.Replace(vector, alpha=draw(numbers), **where), n
        norms = {} if "neurons" in picked else {"norm_match": draw(st.booleans()), "keep_norm": draw(st.booleans())}
        return weir.Add(vector, scale=draw(numbers), **norms, **where), n
    if kind == "clamp":
        low = draw(numbers)
        bounds = draw(st.sampled_from([{"value": low}, {"min": low}, {"max": low}, {"min": low, "max": low + 1}]))
        return weir.Clamp(normal(*front, *unit), strength=draw(numbers), **bounds, **where), None
    k = draw(st.integers(1, 2))
    if "heads" in picked and not each_head:
        unit = (1, D_HEAD)
    if kind == "ablate":
        return weir.Ablate(normal(k, *unit), **where), None
    return weir.LowRank(normal(k, *unit), normal(k, *unit), normal(k), **where), None


@given(parted(), st.integers(0, 2**31))
def test_instructions_do_what_the_formulas_say(asked, seed):
    item, n = asked
    shape = SHAPES[item.hook]
    h = torch.randn(n or 3, int(np.prod(shape)), generator=torch.Generator().manual_seed(seed))
    lowered = item.lower(shape, unknown)
    assert lowered.by_position == (n or 0)
    got, want = apply(lowered, h.numpy(), item.hook), apply_to_rows(item, h, shape).numpy()
    assert np.abs(got - want).max() <= 1e-4 * max(1.0, np.abs(want).max(), float(h.abs().max())), item
    columns = np.arange(h.shape[1])
    if item.heads is not None:
        others = ~np.isin(columns // D_HEAD, item.heads)
        assert all(t.stop - t.start == D_HEAD and t.start // D_HEAD in item.heads for t in lowered.instructions if t.u)
    else:
        others = ~np.isin(columns, item.neurons or columns)
    assert np.array_equal(got[:, others], h.numpy()[:, others])


def head(value: float) -> torch.Tensor:
    return torch.full((D_HEAD,), value)


def added(vector, n: int = 2, **where) -> np.ndarray:
    """What is added to n rows of z, a number for each head (all values of a head are the same), [n, heads]."""
    lowered = weir.Add(vector, 1, hook="z", **where).lower(SHAPES["z"], unknown)
    out = apply(lowered, np.zeros((n, HEADS * D_HEAD))).reshape(n, HEADS, D_HEAD)
    assert (out == out[..., :1]).all()
    return out[..., 0].tolist()


H2 = torch.stack([head(1), head(2)])
"""[2, d_head]."""
OPEN = ["all", "generated", "2:", "sampled", {"token_ids": [3]}]


FEW = [[3, 4], "0:2", "prompt", ":-1"]
"""Selectors of what may be two positions."""


def test_two_vectors_are_for_each_head_where_an_axis_says_so_or_rows_for_positions_are_impossible():
    for positions in (*OPEN, [0, 1, 2], "0:3", 5, "last_prompt"):
        assert added(H2, heads=[2, 0], positions=positions) == [[2, 0, 1, 0]] * 2, positions
    for positions in (*OPEN, [0, 1, 2], 5, *FEW):
        assert added(H2[None], heads=[2, 0], positions=positions) == [[2, 0, 1, 0]] * 2, positions


@pytest.mark.parametrize(("kind", "field"), [(weir.Add, "x.vector"), (weir.Replace, "x.values")])
def test_rows_that_could_be_heads_are_refused(kind, field):
    """With a way to say either, before the request is sent."""
    why = r"\[2, d_head\] for 2 heads .*each head.*each position; give \[1, 2, d_head\] or \[2, 1, d_head\]"
    for positions in FEW:
        with refused(field, why):
            kind(H2, 1, hook="z", heads=[2, 0], positions=positions, path="x")


@pytest.mark.parametrize("kind", ["directions", "R"])
def test_directions_that_could_be_heads_are_refused(kind):
    def make(vectors):
        if kind == "directions":
            return weir.Ablate(vectors, 1, hook="z", heads=[2, 0])
        return weir.LowRank(vectors, vectors, torch.zeros(len(vectors)), 1, hook="z", heads=[2, 0])

    with refused(f"intervention.{kind}", r"2 vectors that make one change; give \[1, 2, d_head\] or"):
        make(H2)
    for vectors, rank in ((H2[None], 1), (torch.eye(D_HEAD)[:2, None], 2), (torch.eye(D_HEAD), 3)):
        assert len(make(vectors).lower(SHAPES["z"], unknown).instructions) == rank * 2


def test_one_direction_to_clamp_for_each_head():
    item = weir.Clamp(torch.eye(D_HEAD)[:2], 1, value=5.0, hook="z", heads=[2, 0], positions=[0, 1])
    got = apply(item.lower(SHAPES["z"], unknown), np.zeros((1, HEADS * D_HEAD))).reshape(HEADS, D_HEAD)
    assert got.tolist() == [[0, 5, 0], [0, 0, 0], [5, 0, 0], [0, 0, 0]]


def test_rows_for_positions():
    """What adds nothing at a position, or at any, becomes nothing; a row of one head is a row."""
    where = {"heads": [2, 0], "positions": [0, 1, 2]}
    each = torch.tensor([[1.0, 2], [0, 4], [0, 0]])[..., None].expand(3, 2, D_HEAD).clone()
    lowered = weir.Add(each, 1, hook="z", **where).lower(SHAPES["z"], unknown)
    assert lowered.per_position == 2 and len(lowered.instructions) == 6
    assert added(each, 3, **where) == [[2, 0, 1, 0], [4, 0, 0, 0], [0] * 4]
    each[:, 0] = 0  # a head that nothing is added to at any position
    assert added(each, 3, **where) == [[2, 0, 0, 0], [4, 0, 0, 0], [0] * 4]
    assert weir.Add(0 * each, 1, hook="z", **where).lower(SHAPES["z"], unknown).instructions == ()
    one = weir.Add(H2, 1, hook="z", positions=[0, 1]).lower((1, D_HEAD), unknown)
    assert one.per_position == 1 and len(one.instructions) == 2


def test_neurons_next_to_each_other_are_one_instruction():
    item = weir.Replace(torch.tensor([[1.0, 2, 3], [4, 5, 6]]), 1, hook="mlp_post", neurons=[5, 1, 6], positions=[0, 1])
    lowered = item.lower((D_MLP,), unknown)
    assert lowered.per_position == 2
    assert [(t.kind, t.start, t.stop) for t in lowered.instructions[:2]] == [(BLEND, 1, 2), (BLEND, 5, 7)]


def test_positions_that_do_not_fit_rows_are_refused():
    with refused("intervention.positions", "3 rows, but 'all' is open-ended"):
        weir.Add(torch.ones(3, 2, D_HEAD), 1, hook="z", heads=[2, 0])
    # Without heads, [3, n] may be one vector of the row's shape, which is known with the model.
    item = weir.Add(torch.ones(3, HEADS * D_HEAD), 1, hook="z")
    with refused("intervention.positions", "3 rows, but 'all' is open-ended"):
        item.lower(SHAPES["z"], unknown)
    with refused("intervention.direction", "expected one vector, got 2 rows"):
        weir.Clamp(torch.ones(2, 2, D_HEAD), 1, value=0.0, hook="z", heads=[2, 0])


@pytest.mark.parametrize(
    ("vector", "where", "shape", "why"),
    [
        (torch.ones(D_HEAD), {}, (HEADS, D_HEAD), r"shape \[3\] .* \[4, 3\] or \[12\]; say which heads="),
        (torch.ones(5), {}, (HEADS, D_HEAD), r"shape \[5\] does not match a row of z, \[4, 3\] or \[12\]$"),
        (torch.ones(2, 3, 3), {"positions": [0, 1]}, (HEADS, D_HEAD), r"shape \[2, 3, 3\] does not match"),
        (torch.ones(12), {"heads": [1]}, (HEADS, D_HEAD), "width 12 does not match the 3 values of a head of z"),
        (torch.ones(1, 3, 3), {"heads": [1, 2]}, (HEADS, D_HEAD), r"vectors for 3 heads, and 2 are picked"),
        (torch.ones(2), {"neurons": [1, 2, 3]}, (D_MLP,), "2 values for 3 neurons"),
        (torch.ones(2), {"hook": "mlp_post"}, (D_MLP,), "width 2 does not match the 10 values of a row of mlp_post"),
        (torch.ones(2), {"hook": "resid_mid"}, (D,), "width 2 does not match the model's 6"),
        (torch.ones(1, 1, 1, 3), {"heads": [1]}, (HEADS, D_HEAD), "dimensions, got shape"),
    ],
)
def test_vectors_that_do_not_fit_the_row(vector, where, shape, why):
    where = {"hook": "mlp_post" if "neurons" in where else "z"} | where
    with refused("x.vector", why):
        weir.Add(vector, 1, path="x", **where).lower(shape, unknown)


@pytest.mark.parametrize(
    ("hook", "parts", "width", "why"),
    [
        ("z", {"heads": [1, 4]}, 3, "does not exist: .* has heads 0..3"),
        ("mlp_post", {"neurons": [3, 10]}, 2, "does not exist: .* has neurons 0..9"),
    ],
)
def test_parts_that_the_row_does_not_have(hook, parts, width, why):
    item = weir.Add(torch.ones(width), 1, path="x", hook=hook, **parts)
    with refused(f"x.{next(iter(parts))}", why):
        item.lower(SHAPES[hook], unknown)


@pytest.mark.parametrize("named", [False, True])
def test_a_vector_of_a_head_for_each_layer(named):
    """Between the layers and the heads there is an axis of rows."""
    stack = torch.stack([H2, 2 + H2])  # [layers, heads, d_head]
    find = lambda ref, field: stack[:, None].numpy()
    item = weir.Add("name" if named else stack[:, None], [5, 3], hook="z", heads=[0, 1], per_layer=True)
    lowered = {one.layers: one.lower(SHAPES["z"], find) for one in item.by_layer(8, find)}
    at = {layer: sorted(float(v[0]) for v in one.rows.values()) for (layer,), one in lowered.items()}
    assert at == {5: [1, 2], 3: [3, 4]}
    by_layer = weir.Add({5: stack[0][None], 3: stack[1][None]}, hook="z", heads=[0, 1])
    for one in by_layer.by_layer(8, find):
        assert one.lower(SHAPES["z"], find).instructions == lowered[one.layers].instructions


def test_equal_vectors_of_heads_are_one_row_of_the_table():
    lowered = weir.Add(head(1), 1, hook="z", heads=range(HEADS)).lower(SHAPES["z"], unknown)
    assert len(lowered.rows) == 1 and len(lowered.instructions) == HEADS
    assert [(t.start, t.stop) for t in lowered.instructions] == [(3 * k, 3 * k + 3) for k in range(HEADS)]
    assert max(reach(t, lowered.rows) for t in lowered.instructions) == 1.0


def test_the_digest_tells_apart_what_positions_undergo():
    """Two instructions for each of two positions, or one for each of four, are not the same."""
    terms = tuple(Instruction(CONST, str(k)) for k in range(4))
    positions = weir.Add(torch.ones(1)).positions
    moves = [ResolvedIntervention("z", (1,), positions, n, terms) for n in (1, 2)]
    assert moves[0].digest != moves[1].digest
    assert [moves[1].of_position(k) for k in range(3)] == [terms[:2], terms[2:], ()]


def test_instructions_for_whole_rows_do_not_grow_on_the_wire():
    add = weir.Add(torch.ones(D), 1).lower((D,), unknown)
    (term,) = ResolvedIntervention("resid_post", (1,), weir.Add(head(1)).positions, 0, add.instructions).to_wire()[-1]
    assert len(term) == 7


def test_which_instructions_need_the_whole_row():
    kinds = {kind: couples(Instruction(kind, "u")) for kind in (CONST, NORM, AFFINE, CLAMP, BLEND, KEEP_NORM)}
    assert kinds == {CONST: False, NORM: True, AFFINE: True, CLAMP: True, BLEND: False, KEEP_NORM: True}


# Requests.

FACTS = EngineCapabilities(
    {Site(hook, layer): "" for hook in ("resid_post", "z") for layer in range(3)},
    3,
    D,
    "float32",
    1000,
    {Site("z", 0): (HEADS, D_HEAD), Site("z", 1): (HEADS, D_HEAD), Site("z", 2): (2, 6)},
)


def admitted(*items):
    return admit({"weir": RequestSpec((), items).to_json()}, FACTS)


def test_layers_with_rows_of_different_shapes():
    found = admitted(weir.Add(torch.ones(HEADS * D_HEAD), "all", hook="z"))
    assert [(m.layers, len(m.instructions)) for m in found.effective] == [((0, 1, 2), 1)]
    with pytest.raises(weir.WeirError, match="width 3 does not match the 6 values of a head of z"):
        admitted(weir.Add(head(1), "all", hook="z", heads=1))
    with refused("interventions[0].heads", r"head 2 does not exist: z has heads 0\.\.1"):
        admitted(weir.Replace(torch.zeros(1, 1, 6), 2, hook="z", heads=[0, 2]))


def test_positions_with_several_instructions_each():
    """Their programs, what admission reckons them to take, and the keys of their blocks in the prefix cache."""
    rows = torch.stack([H2, torch.stack([head(0), head(4)]), torch.zeros(2, D_HEAD)])
    ask = lambda heads: admitted(weir.Add(rows, [0, 1], hook="z", heads=heads, positions=[1, 2, 3]))
    found = ask([2, 0])
    (move,) = found.effective
    assert move.per_position == 2 and [len(move.of_position(k)) for k in range(4)] == [2, 1, 0, 0]
    taps = num_taps(3)
    widths = {tap_of(Site("z", layer)): HEADS * D_HEAD for layer in range(3)}
    table = ProgramTable(TableSizes(16, 16, 64), taps, range(taps), D, widths)
    planner = Planner(frozenset(range(taps * STAGES)), taps * STAGES, 8, table)
    planner.add_steering("r", "rows#vectors#token", [move], 5, None, lambda ds: {d: found.rows[d] for d in ds})
    programs = planner.plan(["r"], [5], [0]).programs
    assert (programs >= 0).tolist() == [False, True, True, False, False]
    assert table.usage() == {"vectors": 3, "programs": 2, "nodes": 3}  # the two layers share them
    most = _count_programs([move], None, 5, 4)
    assert most[0] >= 2 and most[1] >= 3 * len(move.layers)
    keys, same, other = (CacheKeys(ask(heads).effective, 5) for heads in ([2, 0], [2, 0], [2, 1]))
    blocks = [keys.of_block(start, [7] * 2) for start in (0, 2, 4)]
    assert blocks == [same.of_block(start, [7] * 2) for start in (0, 2, 4)]
    assert blocks[0] != other.of_block(0, [7] * 2) and blocks[2] is None
    assert keys.of_block(3, [7] * 2) is None, "at position 3 nothing is added"
