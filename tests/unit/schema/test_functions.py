"""How functions of users travel: by module, as source, or not at all; and what they save."""

from __future__ import annotations

import copy
import gc
import math
import threading
import weakref

import msgspec
import numpy as np
import pytest
import torch

import vllm_weir as weir
from tests.support.hook_functions import clamp_norm
from tests.support.measure import alike
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admit import _refuse_paths
from vllm_weir.frontend.receive.score_table import ToldValues
from vllm_weir.messages import Told
from vllm_weir.schema.functions import Travelling, _here, describe, find, pickled
from vllm_weir.schema.request import RequestSpec
from vllm_weir.schema.user_hooks import Call
from vllm_weir.util import saved

OFFSET = 3.0


def elsewhere(function):
    """A function as another process finds it."""
    wire = msgspec.msgpack.encode(describe(function, "function"))
    return find(msgspec.structs.replace(msgspec.msgpack.decode(wire, type=Travelling), token="of another process"))


def test_a_function_of_a_module_is_found_by_its_name():
    assert elsewhere(clamp_norm) is clamp_norm


def test_a_def_travels_as_source_with_the_modules_that_it_uses():
    def wave(rows, ctx, times: int = 2) -> torch.Tensor:
        inner = lambda x: math.sin(x)
        return [np.float32(inner(one)) * times for one in rows]

    assert elsewhere(wave)([0.5], None) == [np.float32(math.sin(0.5)) * 2]
    assert find(describe(wave, "function")) is wave, "in its own process it is itself"


def test_what_cannot_travel_says_why():
    bound = 1.0

    def closed(rows, ctx):
        return rows * bound

    def module_wide(rows, ctx):
        return rows + OFFSET

    for function, words in (
        (closed, "uses bound of"),
        (module_wide, "uses OFFSET of"),
        (lambda rows, ctx: rows, "def"),
    ):
        with pytest.raises(WeirError, match=words):
            elsewhere(function)
        assert find(describe(function, "function")) is function
    with pytest.raises(WeirError, match="expected a function"):
        weir.Hook("rows + 1")


def test_a_pickle_travels_only_where_both_sides_allow_it():
    bound = torch.ones(2)

    def closed(rows, ctx):
        return rows * bound

    described = pickled(describe(closed, "function"), "function")
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(described), type=Travelling)
    there = msgspec.structs.replace(there, token="of another process")
    assert torch.equal(find(there, unpickle=True)(torch.ones(2), None), torch.ones(2))
    with pytest.raises(WeirError, match=r"uses bound of .* functions='cloudpickle' .WEIR_FUNCTIONS"):
        find(there)
    lock = threading.Lock()
    with pytest.raises(WeirError, match="cannot be pickled: TypeError") as e:
        pickled(describe(lambda rows, ctx: lock, "function"), "hooks[0].function")
    assert e.value.field == "hooks[0].function"


def test_what_is_saved_comes_back():
    given = {"rows": torch.arange(6).view(2, 3), "half": torch.ones(2, dtype=torch.bfloat16), "n": [1, 2.5, "x", None]}
    back = saved.decode(saved.encode(given | {"array": np.eye(2), "number": np.int64(4)}))
    assert torch.equal(back["rows"], given["rows"]) and torch.equal(back["half"], given["half"])
    assert back["n"] == given["n"] and back["number"] == 4 and torch.equal(back["array"], torch.eye(2).double())
    with pytest.raises(WeirError, match="a object"):
        saved.encode({"it": object()})


def told(unsent, reader, kept):
    """Send what is new to a reader; return how many bytes that was."""
    messages_ = [Told("r", name, "", 0, None, [], data, first=first) for name, first, data in unsent.take(kept)]
    for message in messages_:
        reader.record(message)
    return sum(len(message.data) for message in messages_)


def test_what_was_saved_is_sent_once():
    """Lists that grow, shrink and change in place, names that go, and tensors that are the same object."""
    unsent, reader, kept, rows = saved.Unsent(), ToldValues(), {}, [torch.full((100,), float(k)) for k in range(9)]
    kept |= {"parts": [], "sum": torch.zeros(2), "count": 0, "by": {3: [1]}}
    sizes = []
    for k, row in enumerate(rows):
        kept["parts"].append(row)
        kept["sum"] += 1
        kept["count"] += 1
        kept["by"][k] = [k]
        sizes.append(told(unsent, reader, kept))
    assert max(sizes) < 1.5 * min(sizes), "a list that grows is not sent anew"
    assert told(unsent, reader, kept) == 0
    back = reader.saved()
    assert alike(torch.stack(back["parts"]), torch.stack(rows)) and back["by"] == kept["by"]
    assert back["sum"].tolist() == [9, 9] and back["count"] == 9
    kept["parts"][7] -= 1  # and so all from there on
    kept["parts"][8] = "other"
    del kept["sum"]
    assert told(unsent, reader, kept) < 700
    assert reader.saved()["parts"][7].tolist() == [6.0] * 100 and reader.saved()["parts"][8] == "other"
    assert "sum" not in reader.saved()
    kept["parts"] = kept["parts"][:2]
    kept["count"] = []
    told(unsent, reader, kept)
    assert len(reader.saved()["parts"]) == 2 and reader.saved()["count"] == []
    with torch.inference_mode():
        kept["sum"] = torch.zeros(1)
        for _ in range(2):
            kept["sum"] += 1
            told(unsent, reader, kept)
    assert reader.saved()["sum"].item() == 2
    with pytest.raises(WeirError, match="the name 3 is no text"):
        list(unsent.take({3: 1}))


def test_which_compiled_hooks_are_called_together():
    """Those of one function object that differ in floats and small tensors alone."""

    def remade(bound):
        def clamp(rows, ctx, bound=bound):
            return rows.clamp(max=bound)

        return clamp

    def identity(function=clamp_norm, **more):
        hook = weir.Hook(
            function, "z", 1, **{"args": {"w": torch.ones(3), "most": 1.0, "k": 2}, "mode": "compiled"} | more
        )
        ((key, wire),) = hook.lower((4, 3), None).calls.items()
        call = msgspec.msgpack.decode(wire, type=Call)
        assert hook.state or key.startswith(call.identity)
        return call.identity

    same = [identity(), identity(args={"w": torch.zeros(3), "most": 2.0, "k": 2}), identity(key="mine")]
    assert len({*same}) == 1
    large = [{"w": torch.full((20_000,), value), "most": 1.0, "k": 2} for value in (0.0, 1.0)]
    other = [{"args": {"w": torch.ones(4), "most": 1.0, "k": 2}}, {"args": {"w": torch.ones(3), "most": 1.0, "k": 3}}]
    other += [{"state": 2}, {"heads": [1]}, {"heads": [2]}, *({"args": one} for one in large)]
    functions = [remade(1.0), remade(2.0)]
    found = [same[0], *(identity(**one) for one in other), *(identity(one) for one in functions)]
    assert len({*found}) == len(found)


def test_args_and_what_makes_hooks_the_same():
    w = torch.randn(3, dtype=torch.bfloat16)
    make = lambda **more: weir.Hook(clamp_norm, layers=1, args={"w": w, "most": 2, "name": "x"}, **more)
    lowered = make().lower((8,), None)
    (key,) = lowered.calls
    call = msgspec.msgpack.decode(lowered.calls[key], type=Call)
    dtype, shape, data = call.args["w"]
    assert np.array_equal(np.frombuffer(data, dtype).reshape(shape), w.float().numpy()) and call.args["most"] == 2
    assert make(key="mine").lower((8,), None).instructions == make(key="mine").lower((8,), None).instructions
    wrong = [{"w": object()}, {"w": [[1.0], [1.0, 2.0]]}, {"w": ["x"]}, {"n": 1 << 64}, {"text": "x" * 5000}]
    for field, given in (("state", (0,)), *(("args", one) for one in wrong), ("mode", "fast"), ("key", 3)):
        with pytest.raises(WeirError) as caught:
            weir.Hook(clamp_norm, **{field: given})
        assert caught.value.field.startswith(f"hooks.{field}")


def test_tensors_of_integers_stay_integers():
    args = weir.Hook(clamp_norm, args={"at": torch.tensor([1, 5]), "on": torch.tensor([True]), "half": [0.5]}).args
    assert [args[name][0] for name in ("at", "on", "half")] == ["int64", "bool", "float32"]


def test_functions_are_kept_as_long_as_something_names_them():
    """However many others are made meanwhile; copies count, too."""
    weir.params()  # an error that vLLM's import keeps would keep the frames that import it
    gc.collect()
    before = len(_here)

    def made(k: int):
        return lambda rows, ctx: rows + k

    function = made(0)
    hook = weir.Hook(function)
    params, gone = copy.deepcopy(weir.params(hooks=hook)), weakref.ref(function)
    for k in range(5000):
        weir.Hook(made(k))
    assert find(hook.function) is function and len(_here) == before + 1
    del hook, function
    assert find(RequestSpec.carried_by(params.extra_args).hooks[0].function) is gone()
    del params
    gc.collect()
    assert gone() is None and len(_here) == before


def test_hooks_are_kept_or_replaced_as_the_other_arguments_are():
    one, other = (weir.Hook(clamp_norm, layers=layer, args={"most": 2.0}) for layer in (1, 2))
    params = weir.params(weir.params(hooks=one), interventions=weir.Add([1.0], layers=0))
    spec = RequestSpec.carried_by(params.extra_args)
    assert [i.op for i in spec.interventions] == ["add"] and [h.layers for h in spec.hooks] == [(1,)]
    spec = RequestSpec.carried_by(weir.params(params, hooks=[other]).extra_args)
    assert [h.layers for h in spec.hooks] == [(2,)] and len(spec.interventions) == 1


def test_no_code_comes_from_a_client():
    """Neither as JSON nor as what a hook of this process would be."""
    with pytest.raises(WeirError, match="code never comes over HTTP"):
        RequestSpec.parse({"v": 1, "hooks": [{"op": "hook", "function": {"source": "1"}, "layers": 1}]})
    spec = RequestSpec.carried_by(weir.params(hooks=weir.Hook(clamp_norm, layers=1)).extra_args)
    with pytest.raises(WeirError, match="code never comes over HTTP"):
        _refuse_paths(spec)
