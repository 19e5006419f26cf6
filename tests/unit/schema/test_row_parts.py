"""Heads and neurons of captures and interventions: fields, vectors, and the instructions that they become."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vllm_weir as weir
from tests.support.parts import apply_to_rows
from vllm_weir.schema.hooks import HEAD_HOOKS, HOOKS, NEURON_HOOKS, READ_ONLY_HOOKS
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
)
from vllm_weir.schema.request import RequestSpec
from vllm_weir.schema.row_notes import describe_rows, in_words

HEADS, D_HEAD, D_MLP, D = 4, 3, 10, 6
SHAPES = {"z": (HEADS, D_HEAD), "mlp_post": (D_MLP,), "resid_post": (D,)}
FORMS = [3, [3], (3,), range(3, 4), np.array([3]), torch.tensor([3]), torch.tensor(3), np.int64(3)]


def unknown(ref: str, field: str) -> np.ndarray:
    raise AssertionError(field)


# Fields.


@pytest.mark.parametrize("given", FORMS)
@pytest.mark.parametrize(("name", "hook"), [("heads", "z"), ("neurons", "mlp_post")])
def test_every_form_of_a_list(given, name, hook):
    capture = weir.Capture(hook, 1, **{name: given})
    add = weir.Add(torch.ones(1), 1, hook=hook, **{name: given})
    assert getattr(capture, name) == getattr(add, name) == (3,)
    for item, back in (
        (capture, weir.Capture.from_json(json.loads(json.dumps(capture.to_json())))),
        (add, RequestSpec.parse(RequestSpec((), (add,)).to_json()).interventions[0]),
    ):
        assert back.to_json() == item.to_json() and item.to_json()[name] == [3]
        assert getattr(back, name) == (3,)


def test_the_order_is_kept():
    assert weir.Capture("z", 1, heads=[3, 0, 2]).heads == (3, 0, 2)
    assert weir.Capture("mlp_post", 1, neurons=range(9, 3, -3)).to_json()["neurons"] == [9, 6]


def test_what_is_left_out_is_not_written():
    assert not {"heads", "neurons"} & weir.Capture("z", 1).to_json().keys()
    assert not {"heads", "neurons"} & weir.Add(torch.ones(2), 1).to_json().keys()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ([], "an empty list picks nothing; list some, or leave NAME out"),
        ([1, 2, 1], "ONE 1 is listed twice"),
        ([0, -1], "ONE -1 does not exist: NAME count from 0"),
        (-1, "count from 0"),
        ([1.0], "expected an int, got float"),
        (np.array([1.0]), "expected an int, got float"),
        ([True], "expected an int, got bool"),
        (True, "NAME is an int or a list of ints, got bool"),
        ("all", "NAME is an int or a list of ints, got str"),
        ({1}, "got set"),
        (torch.ones(2, 2), "got Tensor"),
        (range(10**9), "more than the limit of 65536"),
        ([10**5000], "ONE .* does not exist"),
    ],
    ids=lambda value: str(type(value).__name__),
)
@pytest.mark.parametrize(("name", "hook"), [("heads", "q"), ("neurons", "mlp_post")])
def test_wrong_lists_are_refused_with_the_field(name, hook, wrong, why):
    pattern = why.replace("NAME", name).replace("ONE", name[:-1])
    for ask in (
        lambda: weir.Capture(hook, 1, path="x", **{name: wrong}),
        lambda: weir.Add(torch.ones(4), 1, hook=hook, path="x", **{name: wrong}),
    ):
        with pytest.raises(weir.WeirError, match=pattern) as e:
            ask()
        assert e.value.field == f"x.{name}" and len(e.value.message) < 200


def test_parts_are_of_hook_points_that_have_them():
    for name, hooks in (("heads", HEAD_HOOKS), ("neurons", NEURON_HOOKS)):
        for hook in HOOKS:
            if hook in hooks:
                weir.Capture(hook, **{name: [0]})
                continue
            with pytest.raises(weir.WeirError, match=f"{hook} has no {name}: leave {name} out") as e:
                weir.Capture(hook, **{name: [0]})
            assert e.value.field == f"capture.{name}"


@pytest.mark.parametrize(
    ("capture", "shape", "why"),
    [
        (weir.Capture("k", 1, heads=[0, 2], path="x"), (2, 8), "head 2 does not exist: k has heads 0..1"),
        (weir.Capture("pattern", 1, heads=4, path="x"), (4, 99), "head 4 does not exist: pattern has heads 0..3"),
        (weir.Capture("mlp_pre", 1, neurons=[9, 10], path="x"), (10,), "neuron 10 .*: mlp_pre has neurons 0..9"),
    ],
)
def test_what_a_row_does_not_have(capture, shape, why):
    with pytest.raises(weir.WeirError, match=why) as e:
        capture.check_shape(shape)
    assert e.value.field == ("x.neurons" if capture.hook == "mlp_pre" else "x.heads")
    capture.check_shape((shape[0] + 1, *shape[1:]))


def test_rows_are_compressed_whole():
    with pytest.raises(weir.WeirError, match="leave compress out, or heads") as e:
        weir.Capture("z", 1, heads=[1], compress="rp8")
    assert e.value.field == "capture.compress"


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
    for make in (
        lambda: weir.Add(torch.ones(4), 1, hook=hook, path="x"),
        lambda: weir.Replace(torch.ones(4), 1, hook=hook, path="x"),
        lambda: weir.Clamp(torch.ones(4), 1, value=0.0, hook=hook, path="x"),
        lambda: weir.Ablate(torch.ones(4), 1, hook=hook, path="x"),
        lambda: weir.LowRank(torch.ones(4), torch.ones(4), [1.0], 1, hook=hook, path="x"),
    ):
        with pytest.raises(weir.WeirError, match=f"{hook} can be captured but not changed: .*change ") as e:
            make()
        assert e.value.field == "x.hook"


@pytest.mark.parametrize("flag", ["norm_match", "keep_norm"])
def test_the_norm_of_neurons(flag):
    with pytest.raises(weir.WeirError, match=f"leave {flag} out") as e:
        weir.Add(torch.ones(2), 1, hook="mlp_post", neurons=[1, 2], **{flag: True})
    assert e.value.field == f"intervention.{flag}"


# Vectors and instructions.


def run(term: Instruction, rows: dict[str, np.ndarray], h: np.ndarray) -> np.ndarray:
    """What one instruction adds to rows [n, width], from the definitions in `schema.instructions`."""
    columns = slice(term.start, term.stop) if term.stop else slice(0, h.shape[1])
    part, out = h[:, columns], np.zeros_like(h)
    if not term.u:
        return out
    u = rows[term.u].astype(np.float64)
    assert u.shape == part.shape[1:]
    norm = np.linalg.norm(part, axis=1, keepdims=True)
    along = part @ rows[term.w].astype(np.float64)[:, None] if term.w else None
    if term.kind == CONST:
        added = term.a * u
    elif term.kind == NORM:
        added = term.a * norm * u
    elif term.kind == AFFINE:
        added = (term.a * along + term.b) * u
    elif term.kind == CLAMP:
        added = term.a * (np.clip(along, term.lo, term.hi) - along) * u
    elif term.kind == BLEND:
        added = term.a * (u - part)
    else:
        assert term.kind == KEEP_NORM
        s = part + (term.a + term.b * norm) * u
        length = np.linalg.norm(s, axis=1, keepdims=True)
        added = np.where(length > 0, s * norm / np.where(length > 0, length, 1) - part, 0)
    out[:, columns] = added
    return out


def apply(lowered: LoweredIntervention, h: np.ndarray, hook: str = "z") -> np.ndarray:
    """Rows under the instructions, by way of the wire; row k is the k-th selected position."""
    item = weir.Add(torch.ones(1), 1)
    move = ResolvedIntervention(hook, (1,), item.positions, lowered.per_position, lowered.instructions)
    move = ResolvedIntervention.from_wire(json.loads(json.dumps(move.to_wire())))
    assert (move.per_position, move.instructions) == (lowered.per_position, lowered.instructions)
    h = h.astype(np.float64)
    if not move.per_position:
        return h + sum((run(term, lowered.rows, h) for term in move.instructions), np.zeros_like(h))
    rows = [h[k : k + 1] for k in range(len(h))]
    return np.concatenate(
        [row + sum((run(t, lowered.rows, row) for t in move.of_position(k)), 0 * row) for k, row in enumerate(rows)]
    )


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


@settings(max_examples=300, deadline=None)
@given(parted(), st.integers(0, 2**31))
def test_instructions_do_what_the_formulas_say(asked, seed):
    item, n = asked
    shape = SHAPES[item.hook]
    h = torch.randn(n or 3, int(np.prod(shape)), generator=torch.Generator().manual_seed(seed))
    lowered = item.lower(shape, unknown)
    assert (lowered.by_position is not None) == (n is not None)
    got, want = apply(lowered, h.numpy(), item.hook), apply_to_rows(item, h, shape).numpy()
    assert np.abs(got - want).max() <= 1e-4 * max(1.0, np.abs(want).max()), item
    if item.heads is not None:
        others = [c for c in range(h.shape[1]) if c // D_HEAD not in item.heads]
        assert all(
            (t.stop - t.start) == D_HEAD and t.start // D_HEAD in item.heads for t in lowered.instructions if t.u
        )
    else:
        others = [c for c in range(h.shape[1]) if c not in (item.neurons or range(h.shape[1]))]
    assert np.array_equal(got[:, others], h.numpy().astype(np.float64)[:, others])
