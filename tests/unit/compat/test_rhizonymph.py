"""The fork's gates and patches are the interventions that a request in Weir's own words would have."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from vllm_weir.compat.http import translate
from vllm_weir.compat.rhizonymph.requests import KnownNames
from vllm_weir.schema.interventions import Add, Clamp
from vllm_weir.schema.keys import asks
from vllm_weir.schema.request import RequestSpec
from vllm_weir.server.limits import ServerLimits
from vllm_weir.server.request import WeirRequest

D = 6
V, W = np.arange(D, dtype=np.float32), np.ones(D, np.float32)
MODULES = {
    "steer": (Add(V, 2, 3.0), Add(W, 1)),
    "clamps": (Clamp(V, 2, value=1.0),),
}
NAMES = KnownNames(lambda name, _field: MODULES[name], D)


def packed(rows, **more):
    rows = np.atleast_2d(rows).astype(np.float32)
    return {"dtype": "float32", "shape": list(rows.shape), "data": base64.b64encode(rows.tobytes()).decode()} | more


def inline(*rows, layers=(2,), hook="post_block", **more):
    return {"kind": "inline", "packed": {hook: packed(np.stack(rows), layer_indices=list(layers), **more)}}


def asked(**body):
    assert asks(None, body)
    return RequestSpec.parse(translate(WeirRequest.parse(None, body, ServerLimits()), body, NAMES).extra_args["weir"])


def gate(when, scope="this_token", **apply):
    return {"when": when, "scope": scope, "apply": {"kind": "add", "steer": inline(V), **apply}}


def test_gates_are_additions_at_generated_tokens():
    probe = {"kind": "probe", "probe": inline(W, layers=[1], hook="pre_attn", scales=[2.0]), "threshold": 0.5}
    spec = asked(
        steering=[
            gate({"kind": "always"}, "rest_of_request", strength=2.0),
            gate(probe | {"sharpness": 4.0}),
            gate(probe, "rest_of_request", steer={"kind": "name", "name": "steer"}, strength=0.5),
            gate({"kind": "probe", "probe": {"kind": "name", "name": "kept"}, "threshold": -1}),
        ],
        weir={"v": 1, "interventions": Add(W, 0).to_json()},
    )
    assert [(p.name, p.hook, p.layer, p.positions.kind) for p in spec.probes] == [
        ("steering.1", "resid_pre", 1, "generated"),
        ("steering.2", "resid_pre", 1, "generated"),
    ]
    assert all(np.array_equal(p.weight.array.ravel(), 2 * W) for p in spec.probes)
    always, soft, first, second, named, own = spec.interventions
    assert own.positions.kind == "all" and {i.positions.kind for i in spec.interventions[:-1]} == {"generated"}
    assert [(i.layers, i.scale) for i in (always, soft, first, second, named)] == [
        ((2,), 2.0), ((2,), 1.0), ((2,), 1.5), ((1,), 0.5), ((2,), 1.0),
    ]  # fmt: skip
    assert np.array_equal(first.vector.array, V) and np.array_equal(second.vector.array, W) and always.when is None
    assert (soft.when.probe, soft.when.above, soft.when.sharpness, soft.when.delay) == ("steering.1", 0.5, 4.0, 0)
    assert (first.when.probe, first.when.latch, first.when.delay) == ("steering.2", True, 1)
    assert first.when.sharpness is None and second.when == first.when, "a latch switches where the sigmoid is half"
    assert (named.when.probe, named.when.above, named.when.sharpness) == ("kept", -1.0, 1.0)


def site(position=4, **more):
    return {"layer": 2, "hook": "post_block", "dest_position": position} | more


def after(rows, spec, positions):
    """What interventions make of rows [positions, d], in float64, straight from their definitions."""
    rows = rows.astype(np.float64)
    for one in spec.interventions:
        for k, position in enumerate(positions):
            if one.op == "clamp":
                (dim,) = np.flatnonzero(one.direction.array)
                if position in one.positions.numbers:
                    rows[k, dim] += one.strength * (one.value - rows[k, dim])
            elif position in one.positions.numbers:
                values = np.atleast_2d(one.values.array)
                value = values[one.positions.rank(position, 99) if len(values) > 1 else 0]
                rows[k] += one.alpha * (value - rows[k])
    return rows


def test_patches_do_what_their_formula_says():
    """``out = (1 - alpha * mask) * row + alpha * mask * source``, entry after entry."""
    table = np.stack([V, W, np.array([0, 0.5, 0, 1, 0, 0])])
    entries = [
        site(7, source_inline=0),
        site(4, source_inline=1, alpha=0.25),
        site(5, source_inline=1, alpha=0.25),
        site(3, source_module="zeros", mask={"indices": [1, 3, 1]}),
        site(3, source_inline=1, mask={"inline": 2}, alpha=0.5),
        site(4, source_module="steer"),
        site(6, source_inline=1, mask={"inline": 1}),
    ]
    spec = asked(patch=entries, patch_vectors=packed(table))
    assert {i.hook for i in spec.interventions} == {"resid_post"} and {i.layers for i in spec.interventions} == {(2,)}
    positions, sources = range(8), {0: V, 1: W, "steer": 3 * V, "zeros": 0 * V}
    rows = np.random.default_rng(0).normal(size=(8, D))
    want = rows.copy()
    for one in entries:
        mask = one.get("mask", {"inline": 1})
        share = table[mask["inline"]] if "inline" in mask else np.isin(np.arange(D), mask["indices"])
        share = one.get("alpha", 1.0) * share
        source = sources[one.get("source_module", one.get("source_inline"))]
        row = want[one["dest_position"]]
        row[:] = (1 - share) * row + share * source
    np.testing.assert_allclose(after(rows, spec, positions), want, rtol=0, atol=1e-6)


def test_rows_of_a_site_are_joined_whatever_their_order():
    spec = asked(patch=[site(p, source_inline=p % 2) for p in (9, 3, 5)], patch_vectors=packed(np.stack([V, W])))
    (one,) = spec.interventions
    assert one.positions.to_json() == [3, 5, 9] and np.array_equal(one.values.array, np.stack([W, W, W]))
    assert len(asked(patch=[site(p, source_module="zeros", layer=p) for p in range(5)]).interventions) == 5


OTHERS = [
    *({name: value} for name in ("patch", "steering") for value in (1, "x", [], ["left"], {"mine": 1})),
    {"conversation_id": "c"},
    {"capture_wait": False},
    {"patch_vectors": {"mine": 1}},
]


@pytest.mark.parametrize("body", OTHERS)
def test_what_is_somebody_elses_or_asks_for_nothing_is_left_alone(body):
    assert not asks(None, body)
