"""Selectors that select nothing in a request are refused when it is admitted, and special tokens are named then."""

from __future__ import annotations

import itertools
import json
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams

from tests.support.check import expected_positions
from tests.unit.refusals import refused
from tests.unit.request_strategies import selectors, served
from vllm_weir import Ablate, Add, Capture, SteeringVector, WeirError
from vllm_weir.compat.probe_hook import HiddenStateRequest
from vllm_weir.compat.vllm_lens.request import in_lens_words, to_weir
from vllm_weir.config.settings import Settings
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.engine_wire import MAX_TOKEN_SELECTORS
from vllm_weir.frontend.admission.reachable import Media, Vocabulary, max_generated
from vllm_weir.frontend.admission.vector_registry import RegistryContents
from vllm_weir.frontend.engine_frontend import EngineFrontend
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import RequestSpec

FACTS = EngineCapabilities(served(4), 4, 8, "float32", 1024)
ROW = np.arange(1.0, 9.0)
TOKENIZER = SimpleNamespace(all_special_ids=[2, 0, None, 1], max_token_id=98)
WORDS = Vocabulary(100, TOKENIZER)


def made() -> EngineFrontend:
    frontend = EngineFrontend(Settings(), chunked=True, vocabulary=WORDS, max_model_len=64)
    frontend.engine.capabilities = FACTS
    return frontend


@pytest.fixture
def frontend():
    with closing(made()) as frontend:
        yield frontend


def spec_of(*items: Any) -> dict[str, Any]:
    captures = tuple(item for item in items if isinstance(item, Capture))
    return RequestSpec(captures, tuple(item for item in items if not isinstance(item, Capture))).to_json()


def ask(frontend: EngineFrontend, *items: Any, P: int = 6, max_tokens: int = 4, **more: Any) -> Any:
    """Admit a request with these captures and interventions."""
    extra = {"weir": spec_of(*items)} if items else {}
    with in_lens_words():
        return frontend.admit(f"r{next(_numbers)}", to_weir(extra | more), [5] * P, P, max_tokens)


_numbers = iter(range(10**9))


@given(selector=selectors(), P=st.integers(1, 40), max_tokens=st.integers(1, 40))
def test_refused_just_where_no_row_is_selected(selector, P, max_tokens):
    """Tokens may be any; what could be selected by another token is there."""
    G = min(max_tokens, 64 - P)
    reached = isinstance(selector, dict) or bool(expected_positions(selector, P, G))
    with closing(made()) as frontend:
        for item, field in (
            (Capture(positions=selector), "capture[0]"),
            (Add(ROW, 1, positions=selector), "interventions[0]"),
        ):
            if reached:
                ask(frontend, item, P=P, max_tokens=max_tokens)
                continue
            with refused(f"{field}.positions", f"max_tokens={max_tokens}") as e:
                ask(frontend, item, P=P, max_tokens=max_tokens)
            assert e.value.message.endswith("raise max_tokens" if max_tokens == G else "raise max_model_len")
            assert selector == "generated" or f"the last position that has one is {P + G - 2};" in e.value.message
        assert not len(frontend.store) or reached


def test_refusals_say_what_to_write(frontend):
    for selector, max_tokens, words in (
        ("generated", 1, "with max_tokens=1 the one generated token never enters the model; use 'sampled'"),
        ([600, 700], 4, "[600, 700] selects no row: with 6 tokens in the prompt and max_tokens=4 the last position"),
        ([600, 700], 4, "the last position that has one is 8; name some from 0 to 8"),
        ("63:", 1000, "max_tokens=1000, of which max_model_len leaves room for 58, the last position that has one"),
    ):
        with pytest.raises(WeirError) as e:
            ask(frontend, Capture(positions=selector), max_tokens=max_tokens)
        assert words in e.value.message, e.value.message


def test_the_first_one_that_selects_nothing_is_named(frontend):
    good, bad = Capture(positions=[0, 900]), Capture("resid_pre", positions=900)
    for items, field in (
        ([good, bad], "capture[1]"),
        ([good, Add(ROW, 1), Ablate(ROW, 1, positions=900)], "interventions[1]"),
        ([Add(0 * ROW, 1, positions=900)], "interventions[0]"),  # one that changes nothing is no exception
        ([Add(ROW, 1, 0.0, positions="generated")], "interventions[0]"),
    ):
        with refused(f"{field}.positions"):
            ask(frontend, *items, max_tokens=1)
    ask(frontend, good, Add(ROW, 1, positions=[-1, 900]), max_tokens=1)


def test_vllm_lens_s_fields(frontend):
    for indices in ([900], []):
        vector = {"activations": [ROW.tolist()], "layer_indices": [1], "position_indices": indices}
        with refused("apply_steering_vectors[0].position_indices"):
            ask(frontend, apply_steering_vectors=[vector])
    # 0 .. 39, of which some are reached
    ask(frontend, apply_steering_vectors=[SteeringVector(np.ones((1, 40, 8)), [1])])
    for nothing in ([], (), False, "[]", "false", np.zeros(0, int), range(0)):
        tracker, wire = ask(frontend, output_residual_stream=nothing)
        assert wire is None and not tracker.pending.memory.spec.site_requests
    with pytest.raises(WeirError, match="expected true, a list"):
        ask(frontend, output_residual_stream="x")


@pytest.mark.parametrize("flags", itertools.product([False, True], repeat=4))
def test_the_drop_in_classes_need_no_second_token(frontend, flags):
    for layers, P in (("all", 1), ([1, 2], 6)):
        params = HiddenStateRequest.parse(layers, *flags).add_capture(SamplingParams(max_tokens=1))
        extra = params.extra_args or {}
        tracker, _ = frontend.admit(f"r{next(_numbers)}", extra, [5] * P, P, 1)
        assert bool(tracker.pending.memory.spec.site_requests) == any(flags) == bool(extra)


def test_max_model_len_bounds_what_is_generated():
    assert [max_generated(6, n, 64) for n in (1, 58, 59, 10**9)] == [1, 58, 58, 58]
    assert max_generated(6, 10**9, None) == 10**9 and max_generated(63, 4, 64) == max_generated(64, 4, 64) == 1


def test_rows_by_position_count_positions_that_are_never_reached(frontend):
    """As a list's do: which of them generation reaches is not known, and receipts tell."""
    ask(frontend, Add(np.tile(ROW, (58, 1)), 1, positions="6:64"), max_tokens=1000)
    with pytest.raises(WeirError, match="57 rows for 58 positions"):
        ask(frontend, Add(np.tile(ROW, (57, 1)), 1, positions="6:64"), max_tokens=1000)


def test_what_the_engine_adds_to_every_request_may_select_nothing():
    every = [{"positions": "generated"}, {"hook": "resid_pre", "positions": [900]}]
    settings = Settings(sinks={"norms": {"logging": {}, "capture": every}})
    sites = [(*site, why) for site, why in FACTS.sites.items()]
    shape = {"num_layers": 4, "d_model": 8, "dtype": "float32", "ring_rows": 1024}
    with closing(EngineFrontend(settings, chunked=True, vocabulary=WORDS, max_model_len=64)) as frontend:
        frontend.learn([{"ok": True, "sites": sites} | shape])
        always = [Add(ROW, 1, positions=p) for p in ("generated", [900], "50:", {"token_ids": [7]})]
        frontend.names.set_always(always)
        frontend.names.vectors.load(RegistryContents(modules={"mood": tuple(always)}))
        _, wire = ask(frontend, max_tokens=1)
        assert wire is not None and wire.table_needs is not None
        named = {"weir": {"v": 1, "modules": ["mood"], "capture": [{"positions": "sampled"}]}}
        frontend.admit("with a module", named, [5] * 6, 6, 1)
        with refused("capture[0].positions"):
            ask(frontend, Capture(positions="generated"), max_tokens=1)


# ---- vocabulary and special tokens ---------------------------------------------------------------------------------


def admitted(*items: Any, words: Vocabulary = WORDS, tokens: bool = True, **more: Any) -> Any:
    return admit({"weir": spec_of(*items)}, FACTS, tokens, vocabulary=words, **more)


MAKE = [(lambda p: Capture(positions=p), "capture[0]"), (lambda p: Add(ROW, 1, positions=p), "interventions[0]")]


@pytest.mark.parametrize(("make", "item"), MAKE)
def test_tokens_that_the_model_does_not_have(make, item):
    for fine in ([99], [0, 400], [98, 99, 100]):
        admitted(make({"token_ids": fine}))
        admitted(make({"not_token_ids": fine}))
    for kind, ids, words in (
        ("token_ids", [100, 400], "ids are 0..99"),
        ("not_token_ids", list(range(100)), "leave some out"),
        ("not_token_ids", list(range(300)), "leave some out"),
    ):
        with refused(f"{item}.positions.{kind}", words):
            admitted(make({kind: ids}))
        admitted(make({kind: ids}), words=Vocabulary())  # nobody knows
    admitted(make({"not_token_ids": list(range(99))}))
    # The tokenizer may know more than the model embeds: placeholders of images.
    wide = Vocabulary(100, SimpleNamespace(all_special_ids=[], max_token_id=120))
    admitted(make({"token_ids": [120]}), words=wide)
    with pytest.raises(WeirError):
        admitted(make({"token_ids": [121]}), words=wide)


def test_special_tokens_are_named_at_admission():
    steer, named = Add(ROW, 1, positions={"special": False}), Positions("not_token_ids", (0, 1, 2))
    made = admitted(Capture(positions={"special": True}), Capture("embed", positions={"special": False}), steer)
    told = {"resid_post": {"token_ids": [0, 1, 2]}, "embed": {"not_token_ids": [0, 1, 2]}}
    assert {w.site.hook: w.positions.to_json() for w in made.spec.site_requests} == told
    assert made.effective[0].positions == named
    assert steer.positions.kind == "special", "what was given stays as it was"
    notes = [entry["positions"] for entry in made.parts[0].notes]
    assert notes == list(told.values()) and json.dumps(notes)
    always = admit({}, FACTS, vocabulary=WORDS, always=[steer], everyone=[Capture(positions={"special": False})])
    assert always.effective[0].positions == always.spec.site_requests[0].positions == named


@pytest.mark.parametrize(("make", "item"), MAKE)
def test_special_tokens_need_a_tokenizer_that_has_some(make, item):
    for special in (True, False):
        with refused(f"{item}.positions.special", "skip_tokenizer_init.*name them: "):
            admitted(make({"special": special}), words=Vocabulary(100))
    for selector in ({"special": True}, {"special": False}, {"token_ids": [1]}, {"not_token_ids": [1]}):
        with refused(f"{item}.positions", "given as embeddings"):
            admitted(make(selector), tokens=False)
    none = Vocabulary(100, SimpleNamespace(all_special_ids=[], max_token_id=99))
    with pytest.raises(WeirError, match="has no special tokens"):
        admitted(make({"special": True}), words=none)
    made = admitted(make({"special": False}), words=none)
    (positions,) = {*(w.positions for w in made.spec.site_requests), *(m.positions for m in made.effective)}
    assert positions.mask(np.arange(3), 3, np.arange(3)).all()


def test_global_interventions_are_checked_against_the_tokenizer_when_they_are_set(frontend):
    frontend.names.set_always([Add(ROW, 1, positions={"special": False})])
    frontend.engine.vocabulary = Vocabulary(100)
    for selector in ({"special": False}, {"token_ids": [100]}):
        with pytest.raises(WeirError) as e:
            frontend.names.set_always([Add(ROW, 1, positions=selector)])
        assert e.value.field.startswith("intervention.positions.")


def test_so_many_selectors_by_token_can_steer(frontend):
    kinds = [{"token_ids": [5]}, {"not_token_ids": [5]}, {"special": False}, {"special": True}, {"token_ids": [6]}]
    items = [Add(ROW, 1, positions=kind) for kind in kinds]
    ask(frontend, *items[:MAX_TOKEN_SELECTORS])
    ask(frontend, *items[:3], Add(ROW, 2, positions={"not_token_ids": [0, 1, 2]}), items[3])  # two of them are the same
    with pytest.raises(WeirError, match="at most 4 different selectors by token"):
        ask(frontend, *items)


def test_rows_by_position_for_everyone_do_not_depend_on_a_prompt(frontend):
    """Else a plain request whose prompt selects more or fewer positions would be refused for what it did not ask."""
    for selector in ("prompt", [0, -1], "-2:", "-2:-1", ":-1", "last_prompt", "all"):
        with pytest.raises(WeirError) as e:
            frontend.names.set_always([Add(np.ones((2, 8)), 1, positions=selector)])
        assert e.value.field.endswith("positions"), selector
    for selector in ([0, 3], "1:3"):
        frontend.names.set_always([Add(np.ones((2, 8)), 1, positions=selector)])
        for P in (1, 2, 9):
            _, wire = ask(frontend, P=P, max_tokens=1)
            assert wire is not None and wire.table_needs is not None, "it refuses nobody"


def test_requests_share_what_is_looked_up_in_the_tokenizer():
    looked_up = []

    class Counting:
        max_token_id = 98

        @property
        def all_special_ids(self):
            looked_up.append(1)
            return [2]

    words = Vocabulary(100, Counting())
    assert [words.of_request(Media()).special_ids for _ in range(3)] == [(2,)] * 3
    assert len(looked_up) == 1
