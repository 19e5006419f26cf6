"""Engine settings, the step budget and the wire forms."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.refusals import pairs
from tests.unit.request_strategies import sensible_captures
from vllm_weir import Capture, WeirError
from vllm_weir.config.env import disabled
from vllm_weir.config.settings import Settings
from vllm_weir.core.cache_keys import hit_limit
from vllm_weir.core.step_budget import StepBudget
from vllm_weir.schema.engine_spec import EngineRequest
from vllm_weir.schema.request import RequestSpec
from vllm_weir.schema.rows import GROUP
from vllm_weir.schema.taps import STAGES


def load(own=None, **environ):
    return Settings.load({} if own is None else {"weir": own}, environ)


def test_defaults_and_precedence():
    assert load() == Settings()
    assert load({"layers": [2, 0]}, WEIR_LAYERS="1", WEIR_TIMEOUT="9") == Settings(layers=[0, 2], timeout=9)
    assert load(WEIR_HOOKS="resid_pre, post_block", WEIR_LAYERS="3,1").hooks == ("resid_pre", "resid_post")
    assert load(WEIR_LAYERS="all").layers == "all"
    assert Settings.load(None, {}) == Settings.load({"other": 1}, {}) == Settings()
    assert load({"hooks": "post_block"}).hooks == ("resid_post",)


def test_an_unknown_setting_is_told_what_there_is():
    with pytest.raises(WeirError, match=r"settings.hook: unknown setting; did you mean 'hooks'\?"):
        load({"hook": ["resid_post"]})


OWN = {
    "settings.hooks": [{"hooks": hooks} for hooks in (["nonsense"], [], [3], 3)],
    "settings.layers": [{"layers": layers} for layers in ([-1], "some", [], 1.5, True)],
    "settings.buffer_bytes": [{"buffer_bytes": size} for size in (10, "much", True)],
    "settings.max_programs": [{"max_programs": True}],
    "settings.timeout": [{"timeout": seconds} for seconds in (True, float("nan"), 0, float("inf"))],
    "settings.overflow": [{"overflow": "grow"}],
    "settings.host_bytes": [{"host_bytes": -1}],
    "settings.refused": [{"refused": "yes"}],
    "settings.describe": [{"describe": "x"}],
    "settings.hoooks": [{"hoooks": ["resid_post"]}],
    "additional_config.weir": [[], "hooks"],
}
ENVIRON = {
    "WEIR_LAYERS": [{"WEIR_LAYERS": ""}, {"WEIR_LAYERS": "1,x"}],
    "WEIR_DESCRIBE": [{"WEIR_DESCRIBE": "{"}],
    "settings.hooks": [{"WEIR_HOOKS": "nonsense"}],
    "settings.buffer_bytes": [{"WEIR_BUFFER_BYTES": "-1"}],
}


@pytest.mark.parametrize(
    ("field", "own", "environ"),
    [*((field, own, {}) for field, own in pairs(OWN)), *((field, None, env) for field, env in pairs(ENVIRON))],
)
def test_bad_settings_name_the_field(field, own, environ):
    with pytest.raises(WeirError) as e:
        Settings.load({} if own is None else {"weir": own}, environ)
    assert e.value.field == field or e.value.field.startswith(field + ".")
    assert "Value error" not in str(e.value)  # pydantic's words around an error of ours


def test_what_changes_the_graph_changes_its_identity():
    same = [load(), load({"layers": "all"}), load({"buffer_bytes": 1 << 20, "timeout": 3})]
    assert len({s.graph_identity() for s in same}) == 1
    assert load({"layers": [1, 0]}).graph_identity() == load({"layers": [0, 1, 1]}).graph_identity()
    # Which models are tapped at all is part of the graph, and the environment is not in vLLM's own key.
    others = [{"layers": [0]}, {"layers": [0, 1]}, {"hooks": ["resid_pre"]}, {"hooks": ["resid_pre", "resid_post"]}]
    others.append({"describe": {"stack": "model.layers"}})
    identities = {load(o).graph_identity() for o in others} | {load().graph_identity()}
    assert len(identities) == len(others) + 1
    both = [load({"hooks": h}).graph_identity() for h in (["resid_pre", "resid_post"], ["resid_post", "resid_pre"])]
    assert both[0] == both[1]


@pytest.mark.parametrize(("text", "off"), [("", 0), ("0", 0), ("false", 0), ("No", 0), ("1", 1), ("true", 1), ("x", 1)])
def test_the_off_switch(text, off):
    assert disabled({"WEIR_DISABLE": text}) == bool(off) and not disabled({})


def asks(**fields):
    return EngineRequest(b"", "", **fields)


@given(
    ring=st.integers(1, 500),
    host=st.integers(1, 500),
    above=st.one_of(st.none(), st.integers(0, 100)),
    widths=st.dictionaries(st.text(max_size=3), st.integers(1, 30), max_size=6),
    tall=st.integers(1, STAGES),
    gone=st.sets(st.text(max_size=3)),
    limit=st.integers(1, 300),
)
def test_step_budget(ring, host, above, widths, tall, gone, limit):
    budget = StepBudget(ring, host, above)
    assert budget.tokens({}, limit) == limit
    for name, width in widths.items():
        budget.join(name, asks(rows_per_token=width, rows_per_tap=tall))
    live = dict.fromkeys(set(widths) - gone)
    tokens = budget.tokens(live, limit)
    assert 1 <= tokens <= limit
    widest = max((widths[r] for r in live), default=0)
    if min(ring, host) >= widest > 0:
        assert tokens * widest <= host
        fits = tokens * widest <= ring
        streams = above is not None and above * widest <= ring and tokens * min(tall, widest) <= ring
        assert fits or (streams and tokens > above)
        more = (tokens + 1) * widest
        assert tokens == limit or more > host or (more > ring and not streams) or tokens * widest > ring - widest
    assert budget.tokens({}, limit) == limit, "a finished request still counts"


def test_a_large_step_is_bounded_by_the_rows_of_one_tap():
    """All blocks of Llama-3.1-8B under the defaults on an H100: steps have the size that vLLM gives them."""
    budget = StepBudget(32_768, 524_288, 512)
    budget.join("r", asks(rows_per_token=32, rows_per_tap=1))
    assert budget.tokens({"r": None}, 16_384) == 16_384
    budget.join("both hooks, before and after", asks(rows_per_token=96, rows_per_tap=3))
    assert budget.tokens({"r": None, "both hooks, before and after": None}, 16_384) == 32_768 // 96
    budget = StepBudget(10**9, 65_536, 512)
    budget.join("its last token", asks(rows_per_token=32, rows_per_tap=1, max_row_tokens=1))
    assert budget.tokens({"its last token": None}, 8_192) == 8_192, "it takes little of the host"


def test_prompts_that_are_reduced_bound_a_step_by_their_groups():
    """The mean of all blocks of Llama-3.1-8B under the defaults on an H100, texts of 50 to 600 tokens."""
    budget = StepBudget(32_768, 524_288, 512, 1024)
    lengths = {f"r{k}": 50 + k % 551 for k in range(1500)}
    for name, length in lengths.items():
        reduced = {"max_row_tokens": 0, "rows_per_group": 64, "first_position": 0, "last_reduced": length - 1}
        budget.join(name, asks(rows_per_token=32, rows_per_tap=1, **reduced))
    live = {name: SimpleNamespace(num_computed_tokens=0) for name in lengths}
    assert budget.tokens(live, 16_384) > 16_000
    for request in live.values():
        request.num_computed_tokens = 10_000  # past its prompt
    assert budget.tokens(live, 16_384) == 16_384


@pytest.mark.parametrize(("computed", "groups_beside"), [(0, 1), (100, 2)])
def test_a_prompt_that_goes_on_inside_a_group_takes_one_more(computed, groups_beside):
    """Seven groups fit: those that the tokens fill, one that they begin, and one that they finish."""
    budget = StepBudget(28, 10**9)
    reduced = {"max_row_tokens": 0, "rows_per_group": 4, "first_position": 0, "last_reduced": 9999}
    budget.join("r", asks(rows_per_token=1, rows_per_tap=1, **reduced))
    live = {"r": SimpleNamespace(num_computed_tokens=computed)}
    assert budget.tokens(live, 2000) == (7 - groups_beside + 1) * GROUP - 1


@given(data=st.data(), ring=st.integers(20, 400), chunk=st.sampled_from([0, 7, 100]), seqs=st.integers(1, 9))
def test_no_step_has_more_groups_than_fit(data, ring, chunk, seqs):
    """Whatever requests a step is made of, and however much of each it has."""
    budget, live, prompts = StepBudget(ring, 10**9, None, seqs, chunk), {}, {}
    for k in range(data.draw(st.integers(1, 12))):
        name, length = f"r{k}", data.draw(st.integers(1, 700))
        last = data.draw(st.integers(0, length - 1))
        first = data.draw(st.integers(0, last))
        reduced = {"max_row_tokens": 0, "rows_per_group": 4, "first_position": first, "last_reduced": last}
        budget.join(name, asks(rows_per_token=2, rows_per_tap=STAGES, **reduced))
        live[name] = SimpleNamespace(num_computed_tokens=data.draw(st.sampled_from([0, 0, 50, length])))
        prompts[name] = first, last, length
    tokens = budget.tokens(live, 2000)
    left, cells, names = tokens, 0, data.draw(st.permutations(list(prompts)))
    for name in names[:seqs]:
        first, last, length = prompts[name]
        computed = live[name].num_computed_tokens or data.draw(st.integers(0, first))  # a hit of the prefix cache
        n = min(left, chunk or length, length - computed)
        left -= n
        groups = {p // GROUP for p in range(computed, computed + n) if first <= p <= last}
        cells += 4 * len(groups)
    assert cells <= ring or tokens == 1


def test_hit_limit():
    assert hit_limit(None) is None and hit_limit(asks()) is None
    assert hit_limit(asks(first_position=0)) == 0 and hit_limit(asks(first_position=None)) is None


@given(captures=sensible_captures(9), before=st.booleans(), dtype=st.sampled_from([None, "float16", "float32"]))
def test_wire_round_trip(captures, before, dtype):
    spec = RequestSpec(tuple(Capture(h, layers, p, before, dtype) for h, layers, p in captures))
    wire = spec.to_json()
    text = json.dumps(wire)
    assert RequestSpec.parse(wire) == RequestSpec.parse(text) == RequestSpec.parse(text.encode()) == spec
    assert json.loads(text) == wire and RequestSpec.parse(spec) is spec and bool(spec)


def test_errors_survive_pickling_between_processes():
    again = pickle.loads(pickle.dumps(WeirError("why", "where")))  # noqa: S301
    assert (again.field, again.message, str(again)) == ("where", "why", "where: why")
