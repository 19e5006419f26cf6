"""What a worker gives users' functions and takes from them: parts of rows, and which rows were spoiled."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

import vllm_weir as weir
from tests.unit.refusals import refused
from vllm_weir.frontend.receive.score_table import ToldValues
from vllm_weir.schema.hooks import Site
from vllm_weir.worker.functions import WorkerFunctions
from vllm_weir.worker.own_function import Part
from vllm_weir.worker.row_functions import _OnDevice
from vllm_weir.worker.tap.mapped import MappedTaps

CPU = torch.device("cpu")
KEPT: list[weir.Hook] = []
"""A function of this process is found as long as its hook lives."""


def nothing(rows, ctx):
    return None


def lowered(function, shape, *hook, **more):
    """A hook's key and what workers are told, at a hook point whose rows have this shape."""
    KEPT.append(weir.Hook(function, *hook, **more))
    ((key, call),) = KEPT[-1].lower(shape, None).calls.items()
    return key, call


class Worker:
    """One that holds a function for request "r", and a reader."""

    def __init__(self, key, call, **more):
        in_graphs = MappedTaps({}, 8, torch.float32, CPU)
        self.functions, self.key, self.read = WorkerFunctions(CPU, in_graphs, **more), key, ToldValues()
        self.functions.hold("r", "reader", {key: call})

    def call(self, rows, first=0, site=Site("z", 2)):  # noqa: B008 - a constant
        part = Part("r", self.key, np.arange(len(rows)))
        return self.functions.call([part], site, np.arange(first, first + len(rows)), rows)

    def tell(self):
        told = self.functions.take()().get("reader", [])
        for one in told:
            self.read.record(msgspec.convert(msgspec.to_builtins(one), type(one)))
        return told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [[1], [3, 0], [2, 1, 0, 3]])
def test_heads_are_cut_out_and_put_back(dtype, heads):
    def change(rows, ctx):
        assert rows.shape == (5, len(heads), 3) and ctx.heads == tuple(heads) and ctx.neurons is None
        return rows.mul_(2) + torch.arange(len(heads))[:, None], {"of": rows[:, 0]}

    rows = torch.randn(5, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    before, worker = rows.clone(), Worker(*lowered(change, (4, 3), "z", heads=heads))
    expected = rows.view(5, 4, 3).clone()
    expected[:, heads] = 2 * expected[:, heads] + torch.arange(len(heads))[:, None]
    assert torch.equal(worker.call(rows).to(dtype), expected.flatten(1)) and torch.equal(rows, before)
    (told,) = worker.tell()
    assert told.shape == [5, 3] and not told.spoiled


def test_neurons_are_cut_out_and_put_back():
    def change(rows, ctx):
        assert rows.shape == (2, 3) and ctx.neurons == (5, 0, 7) and ctx.heads is None
        return rows + 1

    rows = torch.arange(20.0).view(2, 10)
    expected = rows.clone()
    expected[:, [5, 0, 7]] += 1
    assert torch.equal(Worker(*lowered(change, (10,), "mlp_post", neurons=[5, 0, 7])).call(rows), expected)


def test_parts_are_in_the_keys_and_have_to_be_there():
    of = lambda *hook, shape=(4, 3), **more: lowered(nothing, shape, *hook, key="mine", **more)[0]
    keys = [of("z"), of("z", heads=[0]), of("z", heads=[1]), of("z", heads=[0, 1]), of("z", heads=[1, 0])]
    keys += [of("z", heads=[0], shape=(4, 6)), of("mlp_post", neurons=[0], shape=(4,))]
    assert len(set(keys)) == len(keys) and keys[0] == "key mine" and of("z", heads=[0]) == keys[1]
    for hook, shape, more, field in (
        ("z", (4, 3), {"heads": [4]}, "hooks.heads"),
        ("mlp_post", (10,), {"neurons": 10}, "hooks.neurons"),
        ("resid_post", (8,), {"heads": [1]}, "hooks.heads"),
        ("z", (4, 3), {"per_layer": True}, "hooks.per_layer"),
    ):
        with refused(field):
            lowered(nothing, shape, hook, **more)


def spoil(rows, ctx):
    """Positions 3 and 8 become infinite, in the dtype of the rows alone; a row that was not finite stays so."""
    at = (ctx.positions == 3) | (ctx.positions == 8)
    return torch.where(at[:, None], 60_000.0, 1.0) * rows.float()


def test_rows_that_were_spoiled():
    """What only overflows in the model's dtype counts; what was not finite before does not; the first place is said."""
    worker = Worker(*lowered(spoil, (2,), "resid_post"))
    rows = torch.full((4, 2), 2.0, dtype=torch.float16)
    rows[1, 0] = torch.inf
    for first, layer in ((4, 0), (8, 1), (0, 2), (0, 1)):
        worker.call(rows, first, Site("resid_post", layer))
    told = worker.tell()
    assert [(one.layer, one.spoiled) for one in told] == [(1, True), (2, True), (1, True)], "others need no message"
    made = "the hook spoil returned NaN or infinity for"
    first = "rows that were finite, first at resid_post[1], position 3"
    assert worker.read.notes(9) == (f"{made} 3 {first}",) and worker.read.notes(8) == (f"{made} 2 {first}",)
    assert worker.read.notes(3) == () and not worker.tell()


def test_a_position_that_is_computed_anew_is_spoiled_no_more():
    """As the one of a draft that was rejected; another rank than the first tells nothing."""
    key, call = lowered(spoil, (2,), "resid_post")
    worker, silent = Worker(key, call, anew=True), Worker(key, call, tells=False)
    rows = torch.full((2, 2), 2.0, dtype=torch.float16)
    for one in (worker, silent):
        one.call(rows, 2)
        one.call(rows[:1], 5)
    assert len(worker.tell()) == 2 and worker.read.notes(9) and not silent.tell()
    again = Worker(*lowered(nothing_spoiled, (2,), "resid_post"), anew=True)
    again.call(rows, 2)
    for one in again.tell():
        one.name = "spoil"
        worker.read.record(one)
    assert worker.read.notes(9) == ()


def nothing_spoiled(rows, ctx):
    return rows


def test_weights_need_a_model():
    def ask(rows, ctx):
        ctx.parameter("w")

    with refused("hooks", "no model is there to have w"):
        Worker(*lowered(ask, (2,), "resid_post")).call(torch.zeros(1, 2))


def halved(rows, ctx):
    return rows.float() / 3


def test_a_request_that_has_failed_changes_nothing_for_those_that_are_called_with_it():
    """Not even the dtype in which their new rows go on."""
    key, call = lowered(halved, (2,), "resid_post", mode="compiled")
    functions = WorkerFunctions(CPU, MappedTaps({}, 8, torch.float32, CPU))
    parts = [Part("a", key, np.array([0, 2])), Part("b", key, np.array([1]))]
    for part in parts:
        functions.hold(part.request_id, "reader", {key: call})
    rows = torch.tensor([[1.0, 2.0], [4.0, 5.0], [7.0, 8.0]], dtype=torch.bfloat16)
    alone = functions.call(parts, Site("resid_post", 1), np.arange(3), rows)
    functions._failed["a"] = {key}
    beside = functions.call(parts, Site("resid_post", 1), np.arange(3), rows)
    assert torch.equal(beside[1], alone[1]) and torch.equal(beside[[0, 2]], rows[[0, 2]].float())


def test_what_a_mapped_function_holds_on_the_cpu_is_copied_to_the_device_once():
    """The device is torch's "meta", which refuses tensors on the CPU as a GPU does."""
    kept, on_device = torch.randn(3, 4), _OnDevice(torch.device("meta"))

    def function(row, own):
        return own[[0, 2]].sum(0) + row @ kept.T @ kept + torch.mul(input=row, other=kept[1])

    rows, own = torch.empty(5, 4, device="meta"), torch.empty(5, 3, 4, device="meta")
    mapped = torch.func.vmap(function)
    with pytest.raises(RuntimeError):
        mapped(rows, own)
    copies = []
    for _ in range(2):
        with on_device:
            assert mapped(rows, own).device.type == "meta"
        copies.append((on_device._copies[kept], on_device._indices[0, 2]))
    assert all(one is other for one, other in zip(*copies, strict=True))
    assert (len(on_device._copies), len(on_device._indices)) == (1, 1)


def pushed(rows, ctx):
    assert ctx.args["w"].dtype == rows.dtype
    score = rows @ ctx.args["w"]
    return rows + ctx.args["scale"] * torch.relu(score)[:, None] * ctx.args["w"], {"score": score}


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_vectors_come_in_the_dtype_of_the_rows(mode, given):
    generator = torch.Generator().manual_seed(1)
    rows, w = (torch.randn(*shape, generator=generator) for shape in ((5, 8), (8,)))
    for dtype in (torch.bfloat16, torch.float32):
        args = {"w": w.to(given), "scale": 1 / 3}
        worker = Worker(*lowered(pushed, (8,), "resid_post", args=args, mode=mode))
        new = worker.call(rows.to(dtype))
        own, vector = rows.to(dtype), args["w"].to(dtype)
        expected = own + torch.relu(own @ vector)[:, None] * vector / 3
        unit = torch.finfo(dtype).eps * (own.abs() + (own @ vector).abs()[:, None] * vector.abs())
        assert ((new - expected).abs() <= 8 * unit).all()
