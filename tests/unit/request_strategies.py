"""Hypothesis strategies for what callers may send: sensible wishes, and everything else."""

from __future__ import annotations

import base64
import json

from hypothesis import strategies as st

from vllm_weir.schema.hooks import MODEL_HOOKS, STREAM_HOOKS, Site

HOOKS = ["resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"]
KEYWORDS = ["all", "prompt", "generated", "last_prompt", "sampled"]
ints = st.integers(-70, 70)


def served(num_layers: int, refused=()) -> dict[Site, str]:
    """Verdicts of an engine that serves every site but `refused`."""
    sites = [Site(h, layer) for layer in range(num_layers) for h in STREAM_HOOKS] + [Site(h, 0) for h in MODEL_HOOKS]
    return {site: "it is not there" if site in refused else "" for site in sites}


def slices():
    """Valid ones and those that select nothing, however long the prompt is."""
    part = st.one_of(st.just(""), ints.map(str))
    step = st.one_of(st.just(""), st.integers(1, 9).map(lambda n: f":{n}"), st.just(":"))
    return st.builds(lambda a, b, c: f"{a}:{b}{c}", part, part, step)


def is_empty(text: str) -> bool:
    """Whether a slice selects nothing with a prompt of any length."""
    start, stop = (int(part) if part else None for part in text.split(":")[:2])

    def picks(P: int) -> bool:
        first = 0 if start is None else max(0, P + start if start < 0 else start)
        return stop is None or first < (P + stop if stop < 0 else stop)

    return not any(map(picks, range(1, 200)))


def selectors():
    """Every valid form but ``{"special": ...}``, which stands for one of the others."""
    return st.one_of(
        st.sampled_from(KEYWORDS),
        ints,
        st.lists(ints, min_size=1, max_size=6),
        slices().filter(lambda text: not is_empty(text)),
        st.fixed_dictionaries({"token_ids": st.lists(st.integers(0, 20), min_size=1, max_size=5)}),
        st.fixed_dictionaries({"not_token_ids": st.lists(st.integers(0, 20), max_size=5)}),
    )


def sensible_captures(num_layers: int):
    """1 to 5 (hook, layers, positions), all of them to be honoured."""
    layers = st.one_of(st.just("all"), st.lists(st.integers(0, num_layers - 1), min_size=1, max_size=3))
    return st.lists(st.tuples(st.sampled_from(HOOKS), layers, selectors()), min_size=1, max_size=5)


def junk(deepest: int):
    """Anything that a Python caller, or JSON, can hold, nested up to `deepest`."""
    # What vLLM's own parameters cannot hold goes with deep nesting: neither reaches a live engine.
    huge = [st.integers(4400, 5000).map(lambda n: 10**n), st.just(10**30), st.integers()] if deepest > 1000 else []
    leaf = st.one_of(
        *huge,
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.sampled_from([2**31, -(2**31) - 1, 2**63, -1, 1.0, 0.5]),
        st.floats(allow_nan=True, allow_infinity=True),
        st.text(max_size=12),
        st.binary(max_size=6),
        st.sampled_from(["", "all ", "1:2:0", "::-1", "0:9:", ":" * 80, "9" * 5000, "\x00", "\ud800", "resid_mid"]),
    )
    tree = st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=3), st.tuples(inner)
        ),
        max_leaves=8,
    )
    return st.one_of(
        tree,
        st.just([0] * 70_000),
        st.just(range(10**9)),
        st.integers(50, deepest).map(_nested),
    )


def _nested(depth: int):
    value: object = 0
    for _ in range(depth):
        value = [value]
    return value


def any_capture(num_layers: int, deepest: int):
    """A capture's wire form, sensible in some fields and not in others."""
    hook = st.one_of(
        st.sampled_from([*HOOKS, *HOOKS, "post_block", "pre_attn", "blocks.1.hook_resid_post"]),
        st.sampled_from(["resid_mid", "attn_out", "nonsense", "", "blocks." + "9" * 5000 + ".hook_resid_post"]),
        junk(deepest),
    )
    layer = st.integers(-1, num_layers)
    layers = st.one_of(st.just("all"), layer, st.lists(layer, max_size=3), st.lists(layer, max_size=3), junk(deepest))
    fields = {
        "hook": hook,
        "layers": layers,
        "positions": st.one_of(
            selectors(), selectors(), slices(), st.sampled_from([{"special": True}, {"special": False}]), junk(deepest)
        ),
        "before": st.one_of(st.booleans(), junk(deepest)),
        "dtype": st.one_of(st.sampled_from(["float32", "float16", "bfloat16", None, "int8"]), junk(deepest)),
        "compress": st.one_of(
            st.sampled_from(
                [None, "full8", "full8", "none", "rp9", {"method": "topk8", "k": 3}, {"method": "rp8", "k": 0}]
            ),
            junk(deepest),
        ),
        "sink": st.one_of(st.sampled_from(["memory", "nowhere", {"nothing": {}}]), junk(deepest)),
        "keep": st.one_of(st.sampled_from(["always", "marked"]), junk(deepest)),
        "unknown": junk(deepest),
    }
    optional = st.sets(st.sampled_from(list(fields)), max_size=3)
    return st.one_of(
        optional.flatmap(lambda names: st.fixed_dictionaries({n: fields[n] for n in names})),
        optional.flatmap(lambda names: st.fixed_dictionaries({n: fields[n] for n in names})),
        junk(deepest),
    )


def any_site_request(num_layers: int, deepest: int):
    """The value of ``extra_args["weir"]``: objects, JSON strings of them, cut or broken ones, junk."""
    captures = st.lists(any_capture(num_layers, deepest), max_size=3)
    vector = {"b64": "!!not base64!!", "dtype": "float32", "shape": [4]}
    body = st.fixed_dictionaries(
        {
            "v": st.one_of(st.just(1), st.just(1), st.just(1), junk(deepest)),
            "capture": st.one_of(captures, captures, junk(deepest)),
        },
        optional={
            "interventions": st.one_of(
                st.just([]), junk(deepest), st.just([{"op": "add", "vector": vector, "layers": 0}]), st.just([vector])
            ),
            "surprise": junk(deepest),
        },
    )
    plain = st.fixed_dictionaries({"v": st.just(1), "capture": captures})
    text = plain.map(_as_json)
    return st.one_of(
        plain,
        plain,
        body,
        text,
        st.builds(lambda t, n: t[: n % (len(t) + 1)], text, st.integers(0, 400)),
        text.map(lambda t: base64.b64encode(t.encode("utf-8", "replace")).decode()),
        st.sampled_from(
            ["[" * 100_000, '{"v": 1, "capture": [' * 50_000, "NaN", "9" * 5000, '{"v": 2}', b"\xff", "{}"]
        ),
        junk(deepest),
    )


def _as_json(value) -> str:
    def fallback(thing):
        return list(thing[:10]) if isinstance(thing, range) else repr(thing)

    try:
        return json.dumps(value, default=fallback)
    except (ValueError, TypeError, RecursionError):
        return "{"


def any_extra_args(num_layers: int, deepest: int = 5000):
    """``SamplingParams.extra_args`` with at least one of Weir's keys."""
    lens = st.one_of(
        st.booleans(),
        st.lists(st.integers(-1, num_layers), max_size=3),
        st.sampled_from(["true", "[0]", "[1, 0]", "false", "[" * 100_000, "9" * 5000, "[true]"]),
        junk(deepest),
    )
    weir_object = any_site_request(num_layers, deepest)
    return st.one_of(
        st.fixed_dictionaries({"weir": weir_object}),
        st.fixed_dictionaries({"weir": weir_object}),
        st.fixed_dictionaries(
            {"weir": weir_object},
            optional={"output_residual_stream": lens, "apply_steering_vectors": junk(deepest), "theirs": junk(deepest)},
        ),
        st.fixed_dictionaries({"output_residual_stream": lens}, optional={"apply_steering_vectors": junk(deepest)}),
    )
