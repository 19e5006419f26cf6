"""The CPU tap against a loop over tokens, taps and stages."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import types

import numpy as np
import pytest
import torch
import torch._inductor.config as inductor
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor.utils import run_and_get_code

from tests.support.properties import examples
from vllm_weir.schema.instructions import AFFINE, BLEND, CLAMP, CONST, DOSE, FEATURE, KEEP_NORM, NO_NORM, NORM, SCORE
from vllm_weir.schema.taps import STAGES
from vllm_weir.worker.discovery.anchors import AddedTerm, Anchor, TensorKey
from vllm_weir.worker.steering.programs import AFTER_POST, CELL_BIT, LAST
from vllm_weir.worker.tap import cpu_chains, install
from vllm_weir.worker.tap import op as tap_module
from vllm_weir.worker.tap.install import place
from vllm_weir.worker.tap.op import TapSwitch, TapTensors, numbered


@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(0, 12),
    d=st.integers(1, 9),
    beside=st.sampled_from(["", "residual", "offset"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.sampled_from([1.0, 0.22, 3.0]),
    ratio=st.sampled_from([1.0, 0.7]),
)
def test_tap_equals_a_naive_loop(seed, tokens, d, beside, dtype, scale, ratio):
    draw = np.random.default_rng(seed)
    taps, profiles = 3, 4
    ranks = np.full((profiles, taps * STAGES), -1, np.int32)
    for profile in range(profiles):
        columns = np.flatnonzero(draw.random(taps * STAGES) < 0.4)
        ranks[profile, columns] = np.arange(len(columns))
    plan = np.full((tokens + 3, 4), [-1, -1, -1, 0], np.int32)
    row = 0
    for token in range(tokens):
        if draw.random() < 0.6:
            plan[token, :2] = row, draw.integers(profiles)
            row += int((ranks[plan[token, 1]] >= 0).sum())
    hidden = torch.from_numpy(draw.standard_normal((tokens, d))).to(dtype)
    other = torch.from_numpy(draw.standard_normal((tokens, d))).to(dtype)
    if beside == "offset":
        other, ratio = torch.from_numpy(draw.standard_normal(d)).to(dtype).expand(tokens, d), 1.0
    ring = torch.full((row + 1, d), 7.0, dtype=dtype)
    before, beside_before = hidden.clone(), other.clone()
    for tap in range(taps):
        expected = ring.clone()
        for token in range(tokens):
            slot, profile = plan[token, :2]
            for stage in range(STAGES):
                rank = ranks[profile, tap * STAGES + stage] if slot >= 0 else -1
                if rank >= 0 and not beside:
                    expected[slot + rank] = hidden[token] * scale
                elif rank >= 0 and ratio == 1:
                    expected[slot + rank] = (hidden[token] + other[token]) * scale
                elif rank >= 0:
                    expected[slot + rank] = hidden[token] * scale + other[token] * float32(ratio * scale)
        number = numbered(tap, scale, ratio * scale, beside == "offset")
        switch = live(TapTensors(torch.from_numpy(plan), torch.from_numpy(ranks), ring, *no_programs(taps, d)))
        switch.register(number, tap)
        if beside:
            getattr(torch.ops.weir, f"tap_{beside}")(hidden, other, number)
        else:
            torch.ops.weir.tap(hidden, number)
        assert ring.equal(expected)
    assert hidden.equal(before) and other.equal(beside_before)
    assert bool((ring[row] == 7.0).all())


def live(tensors):
    """A switch of which all taps act."""
    switch = TapSwitch(tensors)
    switch.activate_always()
    return switch


def idle():
    """A live switch with nothing in its tables."""
    return live(TapTensors(*[torch.zeros(1, 3)] * 7))


def float32(number):
    return float(np.float32(number))


def no_programs(taps, d):
    """Empty tables: heads, ints, floats, vectors."""
    heads, ints = torch.full((1, taps), -1, dtype=torch.int32), torch.full((1, 8), -1, dtype=torch.int32)
    return heads, ints, torch.zeros(1, 4), torch.zeros(1, d)


def recording(slots, columns, taps=1, *, steered=(), blends=((0, 0, 3, 0),), vector=(9.0, 9.0, 9.0)):
    """A live switch, and the ring that its taps write.

    Token k writes its rows from `slots[k]` on, `columns` (column -> rank) of them. Those in `steered` have `vector` put
    in their place by each of `blends` (tap, lo, hi, shift).
    """
    plan = torch.tensor([[at, 0, 0 if k in steered else -1, 0] for k, at in enumerate(slots)], dtype=torch.int32)
    ranks, heads = torch.full((1, taps * STAGES), -1, dtype=torch.int32), torch.full((1, taps), -1, dtype=torch.int32)
    for column, rank in columns.items():
        ranks[0, column] = rank
    for node, (tap, *_) in enumerate(blends):
        heads[0, tap] = node
    ints = torch.tensor([[BLEND, 0, -1, -1, LAST, *part] for _, *part in blends], dtype=torch.int32)
    ring = torch.zeros(8, 3)
    return live(TapTensors(plan, ranks, ring, heads, ints, torch.ones(len(blends), 4), torch.tensor([vector]))), ring


BOTH = {0: 0, STAGES: 1}
"""The first column of taps 0 and 1."""
OUT = TensorKey("out", -1)


def maybe_compiled(call, compiled):
    return torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call


class Block(torch.nn.Module):
    """Arguments in vLLM's unusual order, and an output of one or two parts."""

    def __init__(self, two: bool) -> None:
        super().__init__()
        self.two = two

    def forward(self, positions, hidden_states, residual=None):
        return (hidden_states * 2, hidden_states * 3) if self.two else hidden_states * 2


@pytest.mark.parametrize("two", [False, True])
def test_arguments_are_found_by_name_however_they_are_passed(two):
    h, r, at = torch.arange(6.0).view(2, 3), torch.full((2, 3), 0.5), torch.tensor([0, 1])
    for call, stream in (
        (lambda b: b(at, h, r), h + r),
        (lambda b: b(at, h, residual=r), h + r),
        (lambda b: b(positions=at, hidden_states=h, residual=r), h + r),
        (lambda b: b(at, h), h),
        (lambda b: b(at, hidden_states=h, residual=None), h),
    ):
        switch, ring = recording([0, 2], {2: 0, STAGES + 1: 1}, 2)
        model = torch.nn.ModuleDict({"block": Block(two)})
        given = TensorKey("arg", 1, "hidden_states"), TensorKey("arg", 2, "residual")
        returned = (TensorKey("out", 0), TensorKey("out", 1)) if two else (OUT, None)
        place(model, Anchor("block", "before", *given), 0, switch)
        place(model, Anchor("block", "after", *returned), 1, switch)
        call(model["block"])
        assert ring[:4:2].equal(stream) and ring[1:4:2].equal(h * 5 if two else h * 2)


class Branches(torch.nn.Module):
    """Adds up what two modules give, or what one gives and the bias that it hands over for others to add."""

    class Scaled(torch.nn.Module):
        def __init__(self, by: float, bias: bool = False) -> None:
            super().__init__()
            self.by, self.bias = by, torch.nn.Parameter(torch.full((3,), 0.5)) if bias else None

        def forward(self, x):
            return x * self.by if self.bias is None else (x * self.by, self.bias)

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.one, self.two = self.Scaled(2.0, bias), self.Scaled(-3.0)

    def forward(self, x):
        if self.one.bias is not None:
            out, bias = self.one(x)
            return 2.0 * (out + bias)
        one, two = self.one(x), self.two(x)
        return 2.0 * one + 4.0 * two


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_points_made_of_two_tensors(bias, compiled):
    """Recorded, and written so that the sum is what was written: token 1 gets the vector 9, token 0 stays."""
    model, (switch, ring) = torch.nn.ModuleDict({"block": Branches(bias)}), recording([0, 1], {0: 0}, steered=[1])
    term = AddedTerm("block.one", OUT, 2.0)
    anchor = Anchor("block.two", "after", OUT, None, 4.0, term)
    if bias:
        anchor = Anchor("block.one", "after", TensorKey("out", 0), scale=2.0, offset=TensorKey("out", 1))
    place(model, anchor, 0, switch)
    x, run = torch.arange(6.0).view(2, 3), maybe_compiled(model["block"], compiled)
    with torch.inference_mode():
        for _ in range(2):
            out = run(x.clone())
            plain = 4.0 * x + 1.0 if bias else -8.0 * x
            assert ring[:2].equal(plain)
            assert out[0].equal(plain[0]) and out[1].equal(torch.full((3,), 9.0))


@pytest.mark.parametrize("with_added_term", [False, True])
def test_a_silent_tap_is_not_asked_in_a_pass_that_is_not_compiled(with_added_term, monkeypatch):
    """Asking costs more than anything else that an idle step does: a dispatched op for each tap."""
    calls = []
    monkeypatch.setattr(tap_module, "_act", lambda usual, hidden, *_: calls.append(hidden))
    model = torch.nn.ModuleDict({"block": torch.nn.Identity(), "before": torch.nn.Identity()})
    switch = TapSwitch(TapTensors(*(torch.full((4, 4), -1, dtype=torch.int32) for _ in range(7))))
    added_term = AddedTerm("before", OUT, 1.0) if with_added_term else None
    place(model, Anchor("block", "after", OUT, added_term=added_term), 5, switch)
    for mask, asked in ((0, 0), (1 << 4, 0), (1 << 5, 1), (tap_module.ALL, 2), (0, 2)):
        switch.set_active(mask)
        model["block"](model["before"](torch.ones(2, 3)))
        assert len(calls) == asked
    switch.activate_always()
    model["block"](model["before"](torch.ones(2, 3)))
    assert len(calls) == 3


def test_a_tapped_module_is_called_as_others_are():
    """Dynamo goes around the code of `torch.nn.Module` that looks for hooks, unless it finds one or a forward of it."""
    model, switch = torch.nn.ModuleDict({"block": torch.nn.Linear(3, 3)}), idle()
    block = model["block"]
    for when, key in (("before", TensorKey("arg", 0, "input")), ("after", OUT)):
        place(model, Anchor("block", when, key), 0, switch)
    assert "forward" not in vars(block) and not (block._forward_hooks or block._forward_pre_hooks)
    assert type(block).__call__ is torch.nn.Module.__call__
    assert isinstance(block, torch.nn.Linear) and type(block).__name__ == "Linear"
    assert type(block).__mro__[1] is torch.nn.Linear, "one class for all that is put around it"
    assert torch.nn.Linear.forward(block, torch.ones(1, 3)).shape == (1, 3), "others of its class are not tapped"


class Counting(torch.nn.Module):
    """Has state of its own, and a buffer."""

    def __init__(self):
        super().__init__()
        self.inner, self.seen = torch.nn.Linear(3, 3), 0
        self.register_buffer("table", torch.ones(3), persistent=False)

    def forward(self, x):
        self.seen += 1
        return self.inner(x) + self.table


@pytest.mark.parametrize("protocol", [None, 0, 2, pickle.HIGHEST_PROTOCOL])
def test_copies_and_pickles_of_a_tapped_module_have_no_taps(protocol):
    """They belong to no engine: it is the model's own module that is copied, or sent to another process."""
    model, (switch, ring) = torch.nn.ModuleDict({"block": Counting()}), recording([0], BOTH, 2)
    for tap in (0, 1):
        place(model, Anchor("block", "after", OUT), tap, switch)
    block = model["block"]
    twin = copy.deepcopy(block) if protocol is None else pickle.loads(pickle.dumps(block, protocol))  # noqa: S301
    assert type(twin) is Counting and [name for name, _ in twin.named_buffers()] == ["table"]
    assert not [name for name in vars(twin) if "weir" in name] and set(twin.state_dict()) == set(block.state_dict())
    with torch.inference_mode():
        out = twin(torch.ones(1, 3))
        assert not ring.any() and (twin.seen, block.seen) == (1, 0)
        assert torch.equal(block(torch.ones(1, 3)), out) and ring.any()
        assert torch.equal(maybe_compiled(twin, True)(torch.ones(1, 3)), out)
    assert len([name for name, _ in block.named_buffers() if "weir" in name]) == 2, "the module itself stays as it was"


class Written(torch.nn.Module):
    """Its forward was replaced on the instance, as some libraries do."""

    def forward(self, x):
        raise AssertionError("replaced")


def doubled(self, x):
    return 2 * x


def written(bound):
    block = Written()
    block.forward = types.MethodType(doubled, block) if bound else functools.partial(doubled, block)
    return torch.nn.ModuleDict({"block": block})


def test_a_copy_keeps_the_forward_that_was_on_the_instance():
    model, switch = written(True), idle()
    place(model, Anchor("block", "after", OUT), 0, switch)
    twin = copy.deepcopy(model)["block"]
    assert type(twin) is Written and twin.forward.__self__ is twin
    assert twin(torch.ones(1)).tolist() == [2.0]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("bound", [False, True])
def test_a_forward_that_was_replaced_before_is_tapped_too(bound, compiled):
    model, (switch, ring) = written(bound), recording([0], BOTH, 2)
    place(model, Anchor("block", "before", TensorKey("arg", 0, "x")), 0, switch)
    place(model, Anchor("block", "after", OUT), 1, switch)
    with torch.inference_mode():
        assert maybe_compiled(model["block"], compiled)(torch.ones(1, 3)).tolist() == [[2.0] * 3]
    assert ring[:2].tolist() == [[1.0] * 3, [2.0] * 3]


def test_a_tap_whose_engine_is_gone_says_so():
    """It cannot know what it was to do; to do nothing would be silently wrong."""
    model, switch = torch.nn.ModuleDict({"block": torch.nn.Identity()}), idle()
    place(model, Anchor("block", "after", OUT), 0, switch)
    (number,) = [tensor for name, tensor in model.named_buffers()]
    del switch
    model["block"] = torch.nn.Identity()  # what is around the old one's forward holds the switch
    gc.collect()
    with pytest.raises(RuntimeError, match="engine is gone"):
        torch.ops.weir.tap(torch.ones(1, 3), number)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_taps_at_one_place_act_in_the_order_in_which_they_are_placed(when, compiled):
    model, (switch, ring) = torch.nn.ModuleDict({"block": torch.nn.Identity()}), recording([0], BOTH, 2, steered=[0])
    for tap in (0, 1):
        place(model, Anchor("block", when, TensorKey("arg", 0, "input") if when == "before" else OUT), tap, switch)
    with torch.inference_mode():
        maybe_compiled(model["block"], compiled)(torch.ones(1, 3))
    assert ring[:2].tolist() == [[1.0] * 3, [9.0] * 3], "the first steers what the second records"


_IN, _OUT = TensorKey("arg", 1, "hidden_states"), TensorKey("out", 0)


@pytest.mark.parametrize(
    ("anchor", "keys"),
    [
        (Anchor("m", "before", _IN), "given"),
        (Anchor("m", "before", _IN, TensorKey("arg", 2, "residual")), "given"),
        (Anchor("m", "before", TensorKey("arg", -1, "hidden_states")), "given"),
        (Anchor("m", "after", TensorKey("out", -1)), "one"),
        (Anchor("m", "after", _OUT), "one"),
        (Anchor("m", "after", _OUT, TensorKey("out", 1)), "two"),
        (Anchor("m", "after", TensorKey("out", 1), TensorKey("out", 0)), "two"),
        (Anchor("m", "after", _OUT, TensorKey("out", 1)), "one"),
        (Anchor("m", "after", _OUT, TensorKey("out", 1)), "none"),
        (Anchor("m", "after", _OUT, TensorKey("out", 1)), "list"),
        (Anchor("m", "after", _OUT, TensorKey("out", 2)), "two"),
        (Anchor("m", "after", _OUT, _IN), "two"),
        (Anchor("m", "after", _OUT, offset=TensorKey("out", 1)), "offset"),
    ],
)
@pytest.mark.parametrize("by_name", [False, True])
def test_a_tap_finds_the_tensors_of_an_anchor(anchor, keys, by_name, monkeypatch):
    positions, hidden, residual = torch.arange(3), torch.randn(3, 4), torch.randn(3, 4)
    args: tuple = (positions,) if by_name else (positions, hidden, residual)
    kwargs = {"hidden_states": hidden, "residual": residual} if by_name else {}
    if anchor.hidden.index < 0 and anchor.when == "before":
        kwargs = {"hidden_states": hidden}
    output = {"given": None, "one": hidden, "two": (hidden, residual), "offset": (hidden, residual[0])}
    output = (output | {"none": (hidden, None), "list": [hidden, residual]})[keys]
    found = touched(anchor, args, kwargs, output, monkeypatch)
    for got, wanted in zip(found, anchor.tensors(args, kwargs, output), strict=True):
        assert (got is None and wanted is None) or (got.data_ptr() == wanted.data_ptr() and got.shape == wanted.shape)


@pytest.mark.parametrize(
    "anchor", [Anchor("m", "after", TensorKey("out", 1)), Anchor("m", "after", TensorKey("out", 1), _OUT)]
)
def test_a_call_that_does_not_return_what_is_tapped_is_an_error(anchor, monkeypatch):
    for output in (torch.zeros(3, 4), (torch.zeros(3, 4),)):
        with pytest.raises((AttributeError, IndexError)):
            anchor.tensors((), {}, output, None)
        with pytest.raises((AttributeError, IndexError)):
            touched(anchor, (), {}, output, monkeypatch)


def touched(anchor, args, kwargs, output, monkeypatch):
    """What the tap at an anchor is given in one call."""
    found = []
    monkeypatch.setattr(tap_module, "_act", lambda usual, hidden, other, number: found.append((hidden, other)))
    module, switch = torch.nn.Module(), idle()
    module.weir_tap_0 = numbered(0)
    layer = install._tap(anchor, "weir_tap_0", switch, 0)
    assert layer(lambda *_, **__: output)(module, *args, **kwargs) is output
    (tensors,) = found
    return tensors


def columns_of_nodes(draw, count, d):
    """lo, hi and shift of nodes: half of them act on whole rows of `d`, and vectors have as many values."""
    whole, share, place = torch.rand(3, count, generator=draw)
    whole = whole < 0.5
    lo = torch.where(whole, 0, (place * d).long())
    hi = torch.where(whole, d, lo + 1 + (share * (d - lo)).long())
    return lo, hi, (torch.rand(count, generator=draw) * (d - hi + lo + 1)).long() - lo


@given(st.integers(0, 2**31), st.integers(1, 4), st.booleans())
def test_chains_that_are_followed_together_and_one_by_one_give_the_same_bits(seed, length, past_post):
    """However many different programs are in the batch."""
    draw = torch.Generator().manual_seed(seed)
    programs, tokens, d = 9, 17, 8

    def numbers(low, high, *shape):
        return torch.randint(low, high, shape, generator=draw, dtype=torch.int32)

    def normal(*shape):
        return torch.randn(*shape, generator=draw)

    count = programs * length
    node = torch.arange(count, dtype=torch.int32).reshape(programs, length)
    following = torch.where(torch.arange(length) < length - 1, node + 1, -1)
    every = torch.tensor([BLEND, CONST, NORM, AFFINE, CLAMP, KEEP_NORM, FEATURE, SCORE, DOSE])
    kinds = every[numbers(0, len(every), count).long()]
    # What comes after the stream has been recorded comes last, and begins with a row of its own.
    turn = numbers(0, length + 1, programs, 1)
    late = torch.arange(length) >= turn
    last = (numbers(0, 2, programs, length) > 0) | (torch.arange(length) + 1 == turn) | (following < 0)
    flags = late * AFTER_POST | last * LAST
    # Cells 1 and 2 hold factors, and scores and doses are written into 3 to 6.
    cell = torch.where((kinds == SCORE) | (kinds == DOSE), numbers(3, 7, count), numbers(0, 3, count))
    flags = flags.flatten() | cell << CELL_BIT
    cells = torch.tensor([0.0, 1.0, 0.5])[numbers(0, 3, tokens, 6).long()]
    fields = [kinds, *numbers(0, 6, 2, count), following.flatten(), flags, *columns_of_nodes(draw, count, d)]
    ints = torch.stack(fields, 1).int()
    floats = normal(count, 4)
    floats[:, 2:] = floats[:, 2:].sort(1)[0]
    nodes = torch.where(numbers(0, 4, tokens) > 0, node[numbers(0, programs, tokens).long(), 0], -1)
    h, vectors = normal(tokens, d), normal(6, d)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for few in (0, programs):
            patch.setattr(cpu_chains, "MAX_SEPARATE_CHAINS", few)
            own_cells = cells.clone()
            of_tokens = cpu_chains.Cells(own_cells, torch.arange(tokens), torch.float32)
            chains = cpu_chains.Chains(ints.numpy(), floats, vectors, of_tokens, tokens)
            found.append((*chains.follow(nodes.numpy(), h, past_post), chains.changed, own_cells))
    (stopped, rows, changed, written), (same_stop, same_rows, same_changed, same_written) = found
    assert (stopped == same_stop).all() and torch.equal(rows, same_rows)
    assert (changed == same_changed).all() and torch.equal(written, same_written)
    assert torch.equal(rows[~changed], h[~changed])


@examples(60)
@given(st.integers(0, 2**31), st.sampled_from([0, 8]))
def test_a_dose_is_the_norm_of_the_change_over_the_norm_of_the_row(seed, few):
    """Of the intervention that ends with it alone, however its terms are cut; the rows keep their bits."""
    draw = torch.Generator().manual_seed(seed)
    h, vectors = torch.randn(5, 8, generator=draw), torch.randn(4, 8, generator=draw)
    h[3] = 0.0
    factors = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.25])
    parts, terms = (0, 8, 0), ((CONST, 0, 0, 8), (BLEND, 1, 2, 5), (AFFINE, 2, 0, 8))

    def run(measured):
        ints, floats = [], []
        for kind, u, lo, hi in (terms[0], terms[1], (DOSE, -1, *parts[:2]), terms[2], (DOSE, -1, *parts[:2])):
            if kind == DOSE and not measured:
                ints[-1][4] |= LAST
                continue
            flags = (LAST if kind == DOSE else 0) | (4 + len(ints) if kind == DOSE else 1) << CELL_BIT
            ints.append([kind, u, 3 if kind == AFFINE else -1, len(ints) + 1, flags, lo, hi, 0])
            floats.append([0.7, 0.3, 0.0, 0.0])
        ints[-1][3] = -1
        cells = torch.zeros(5, 9)
        cells[:, 0] = factors
        of_tokens = cpu_chains.Cells(cells, torch.arange(5), torch.float32)
        chains = cpu_chains.Chains(np.array(ints, np.int32), torch.tensor(floats), vectors, of_tokens, 5)
        _, rows = chains.follow(np.zeros(5, np.int64), h, True)
        return rows, chains.changed, cells

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_chains, "MAX_SEPARATE_CHAINS", few)
        (rows, changed, _), (plain, plain_changed, _) = run(True), run(False)
        cells = run(True)[2]
    assert torch.equal(rows, plain) and (changed == plain_changed).all()
    row = h.double()
    first = 0.7 * vectors[0].double().expand(5, 8).clone()
    first[:, 2:5] += 0.7 * (vectors[1, 2:5].double() - row[:, 2:5])
    change = first * factors.double()[:, None]
    for cell in (5, 7):
        norms = row.norm(dim=1)
        want = torch.where(norms == 0, NO_NORM, change.norm(dim=1) / norms)
        torch.testing.assert_close(cells[:, cell], want.float(), rtol=1e-5, atol=1e-7)
        row = row + change
        change = (0.7 * (row @ vectors[3].double()) + 0.3)[:, None] * vectors[2].double() * factors.double()[:, None]


def added(kind, h, u, w, a, b, low, high):
    """What an instruction adds to (a part of) a row, float64."""
    if kind == CONST:
        return a * u
    if kind == NORM:
        return a * np.linalg.norm(h) * u
    if kind == AFFINE:
        return (a * (w @ h) + b) * u
    if kind == CLAMP:
        return a * (np.clip(w @ h, low, high) - w @ h) * u
    if kind == BLEND:
        return a * (u - h)
    turned = h + (a + b * np.linalg.norm(h)) * u
    return turned * (np.linalg.norm(h) / np.linalg.norm(turned)) - h


def stages_of(h, node, ints, floats, vectors):
    """A row before its chain of nodes, where the post stage ends, and after it; float64."""
    values, found, delta = vectors.double().numpy().ravel(), [h.copy()], np.zeros_like(h)
    while node >= 0:
        kind, u, w, node_after, flags, lo, hi, shift = ints[node].tolist()
        if flags & AFTER_POST and len(found) == 1:
            found.append(h.copy())
        at = slice(shift + lo, shift + hi)
        vector, along = (values[x * vectors.shape[1] :][at] if x >= 0 else None for x in (u, w))
        delta[lo:hi] += added(kind, h[lo:hi], vector, along, *floats[node].tolist())
        if flags & LAST:
            h, delta = h + delta, np.zeros_like(h)
        node = node_after
    return [*found, *[h] * (STAGES - len(found))]


def chains(draw, heads, vectors, width):
    """Chains of up to three nodes that act on parts of rows: heads (filled in), ints, floats.

    A vector of the last table rows is as wide as the row; the others are of one table row.
    """
    ints, floats = [], []
    for at in np.ndindex(*heads.shape):
        length = int(draw.integers(0, 4))
        post = int(draw.integers(0, length + 1))
        for k in range(length):
            if k == 0:
                heads[at] = len(ints)
            kind = int(draw.integers(6))
            wide = draw.random() < 0.5
            size = width if wide else min(width, vectors.shape[1])
            u, w = (len(vectors) - -(-width // vectors.shape[1]), 3) if wide else draw.integers(0, 3, 2).tolist()
            w = u if wide else w
            lo, hi = sorted(draw.choice(width + 1, 2, replace=False).tolist())
            hi = min(hi, lo + size)
            shift = int(draw.integers(-lo, size - hi + 1))
            flags = (AFTER_POST if k >= post else 0) | (
                LAST if k in (length - 1, post - 1) or draw.random() < 0.5 else 0
            )
            follows = len(ints) + 1 if k < length - 1 else -1
            ints.append((kind, u, w if kind in (AFFINE, CLAMP) else -1, follows, flags, lo, hi, shift))
            floats.append((draw.normal(), draw.normal(), -0.5, 0.5))
    return np.array(ints or [(0,) * 8], np.int32), np.array(floats or [(0.0,) * 4], np.float32)


@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(1, 8),
    d=st.integers(1, 5),
    width=st.integers(1, 14),
    around=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    reduced=st.booleans(),
    separate=st.booleans(),
)
def test_rows_of_any_width_are_read_and_steered_in_any_of_their_columns(
    seed, tokens, d, width, around, reduced, separate
):
    """Against a loop in float64: slices of tensors, rows that span several of the ring's, parts of rows."""
    draw = np.random.default_rng(seed)
    taps, programs, times = 2, 3, -(-width // d)
    ranks = np.full((1, taps * STAGES), -1, np.int32)
    columns = np.flatnonzero(draw.random(taps * STAGES) < 0.6)
    ranks[0, columns] = times * np.arange(len(columns))
    plan = np.full((tokens, 4), [-1, -1, -1, 0], np.int32)
    plan[:, 0], plan[:, 1], plan[:, 2] = (
        np.arange(tokens) * times * len(columns),
        0,
        draw.integers(-1, programs, tokens),
    )
    if reduced:
        plan[:, 0], plan[:, 3] = 0, -1
        plan[0, 3] = tokens
    heads, vectors = np.full((programs, taps), -1, np.int32), draw.standard_normal((3 + times, d)).astype(np.float32)
    ints, floats = chains(draw, heads, vectors, width)
    ring = torch.full((tokens * times * max(1, len(columns)), d), 7.0)
    whole = torch.from_numpy(draw.standard_normal((tokens, around[0] + width + around[1]))).float()
    whole[torch.from_numpy(draw.random(whole.shape) < 0.1)] = -0.0
    tables = [torch.from_numpy(x) for x in (heads, ints, floats, vectors)]
    switch = live(TapTensors(torch.from_numpy(plan), torch.from_numpy(ranks), ring, *tables))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_chains, "MAX_SEPARATE_CHAINS", 9 if separate else 0)
        for tap in range(taps):
            number, before = numbered(tap), whole.clone()
            switch.register(number, tap, (around[0], around[0] + width))
            torch.ops.weir.tap(whole, number)
            rows = before[:, around[0] : around[0] + width].double().numpy()
            first = [heads[program, tap] if program >= 0 else -1 for program in plan[:, 2]]
            stages = [stages_of(row, node, ints, floats, tables[3]) for row, node in zip(rows, first, strict=True)]
            expected = before.clone()
            expected[:, around[0] : around[0] + width] = torch.from_numpy(np.stack([row[-1] for row in stages]))
            torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
            untouched = torch.ones_like(whole, dtype=torch.bool)
            for token, node in enumerate(first):
                while node >= 0:
                    untouched[token, around[0] + ints[node, 5] : around[0] + ints[node, 6]] = False
                    node = ints[node, 3]
            bits, same = (x[untouched].view(torch.int32) for x in (whole, before))
            assert bits.equal(same), "also the sign of a zero"
            for stage in range(STAGES):
                rank = ranks[0, tap * STAGES + stage]
                for token in range(tokens) if rank >= 0 else ():
                    wanted = sum(row[stage] for row in stages) if reduced else stages[token][stage]
                    found = ring.view(-1)[(plan[token, 0] + rank) * d :][:width]
                    torch.testing.assert_close(found.double(), torch.from_numpy(wanted), rtol=1e-4, atol=1e-4)
    if times * len(columns) and d * times > width and not reduced:
        assert bool((ring.view(-1, times * d)[:, width:] == 7.0).all()), "nothing is written behind a row"


@pytest.mark.parametrize("compiled", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_taps_on_slices_of_one_tensor(compiled):
    """Queries, keys and values of one projection: each is recorded, and steered, in its own columns."""
    sizes = {"q": (0, 4), "k": (4, 6), "v": (6, 8)}
    model = torch.nn.ModuleDict({"qkv": torch.nn.Linear(8, 8, bias=False)})
    ranks, blends = {0: 0, STAGES: 2, 2 * STAGES: 3}, ((0, 2, 4, -2), (2, 0, 2, 0))
    switch, ring = recording([0, 4], ranks, 3, steered=[1], blends=blends, vector=(9.0, 8.0, 0.0))
    for tap, columns in enumerate(sizes.values()):
        place(model, Anchor("qkv", "after", OUT, columns=columns), tap, switch)

    def split(x):
        return [part * 1.0 for part in model["qkv"](x).split([4, 2, 2], -1)]

    run = torch.compile(split, backend=compiled, fullgraph=True) if compiled else split
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        plain = x @ model["qkv"].weight.T
        q, k, v = run(x)
        expected = plain.clone()
        expected[1, 2:4] = expected[1, 6:8] = torch.tensor([9.0, 8.0])
        torch.testing.assert_close(torch.cat([q, k, v], 1), expected)
        flat = ring.view(2, 12)
        torch.testing.assert_close(torch.cat([flat[:, :4], flat[:, 6:8], flat[:, 9:11]], 1), plain)


@pytest.mark.parametrize(
    ("shape", "columns", "rows"),
    [
        ((1, 5, 6), None, (5, 6)),
        ((1, 5, 6), (0, 6), (5, 6)),
        ((1, 5, 6), (2, 4), (5, 2)),
        ((4, 2, 3), (0, 6), (4, 6)),
        ((1, 2, 3), (0, 6), (1, 6)),
        ((4, 6), (1, 3), (4, 2)),
    ],
)
def test_a_tensor_of_three_dimensions_has_a_batch_of_one_or_heads(shape, columns, rows):
    """With one token, too: then the columns tell."""
    seen = []
    switch, number = idle(), numbered(3)
    switch.register(number, 3, columns)
    switch.launch = lambda hidden, *_, **__: seen.append(hidden)
    tensor = torch.arange(float(np.prod(shape))).view(shape)
    torch.ops.weir.tap(tensor, number)
    assert seen[0].shape == rows
    seen[0].zero_()
    left = tensor.reshape(-1, tensor.numel() // rows[0])
    inside = torch.zeros_like(left, dtype=torch.bool)
    start, stop = columns or (0, left.shape[1])
    inside[:, start:stop] = True
    assert not left[inside].any() and left[~inside].equal(torch.arange(float(np.prod(shape))).view_as(left)[~inside])


def silent(model, anchors, launch, head_size=None):
    """A switch with taps at these anchors, which do what `launch` does."""
    switch = TapSwitch(TapTensors(*[torch.zeros(1, 4)] * 7))
    for tap, anchor in anchors.items():
        place(model, anchor, tap, switch, **({} if head_size is None else {"head_size": head_size}))
    switch.launch = launch
    return switch


AS_VLLM = {"enable_auto_functionalized_v2": False, "force_disable_caches": True}


@pytest.mark.thorough
def test_attentions_output_is_tapped_in_place_by_the_compiler():
    """Where vLLM cuts the graph, the output of attention is an input, [tokens, heads, head size]: it is not copied."""
    model, seen = torch.nn.Module(), []
    model.o_proj = torch.nn.Linear(128, 16, bias=False)
    anchors = {3: Anchor("o_proj", "before", TensorKey("arg", 0, "input_"))}
    switch = silent(model, anchors, lambda hidden, *_, **__: seen.append(tuple(hidden.shape)) or hidden.add_(1.0), 32)
    switch.set_active(1 << 3)
    compiled = torch.compile(lambda heads: model.o_proj(heads.view(-1, 128)), fullgraph=True, dynamic=True)
    with torch.no_grad(), inductor.patch(AS_VLLM):
        for tokens in (5, 1):
            heads = torch.randn(tokens, 4, 32)
            before = heads.clone()
            found, code = run_and_get_code(compiled, heads)
            assert all("weir.tap" in one and "cpp_fused" not in one for one in code) and (code or tokens == 1)
            assert seen[-1] == (tokens, 128) and torch.equal(heads, before + 1)
            assert torch.allclose(found, (before + 1).view(-1, 128) @ model.o_proj.weight.T, atol=1e-5)


class _Three(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return q.clone(), k.clone(), v.clone()


@pytest.mark.thorough
def test_rows_with_gaps_are_tapped_right_by_the_compiler():
    """q and k of one packed projection, where nothing rotates them: Inductor copies such views wrongly."""
    model = torch.nn.Module()
    model.attention = _Three()
    anchors = {tap: Anchor("attention", "before", TensorKey("arg", tap, "qk"[tap])) for tap in (0, 1)}
    silent(model, anchors, lambda hidden, *_, **__: hidden.add_(1.0)).set_active(3)

    def block(x):
        return model.attention(*x.mul(2.0).chunk(3, dim=-1))

    x = torch.randn(9, 384)
    with torch.no_grad(), inductor.patch(AS_VLLM):
        found = torch.compile(block, fullgraph=True, dynamic=True)(x)
    q, k, v = (2 * x).chunk(3, dim=-1)
    for got, wanted in zip(found, (q + 1, k + 1, v), strict=True):
        assert torch.equal(got, wanted)
