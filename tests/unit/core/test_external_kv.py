"""What a request may load from a KV connector, and whether it changes keys and values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vllm_weir as weir
from tests.unit.request_strategies import served
from vllm_weir.core.cache_keys import ExternalKV
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.engine_wire import make_engine_request
from vllm_weir.schema.engine_traits import TableSizes

LAYERS, D, P = 4, 8, 6
FACTS = EngineCapabilities(served(LAYERS), LAYERS, D, "float32", 1024)
SIZES = TableSizes(64, 64, 1024)
V = np.ones(D, np.float32)
PROBE = weir.Probe("one", V, 0.0, "resid_post", 0, positions="prompt")


def of(**asked):
    params = weir.params(capture=asked.pop("capture", ()), **asked)
    admitted = admit(params.extra_args, FACTS)
    request = make_engine_request(admitted, "reply", list(range(P)), P, 8, FACTS, 1, SIZES)
    return ExternalKV.of(request, list(range(P)))


@pytest.mark.parametrize(
    ("asked", "limit", "changed", "prompt_changed"),
    [
        ({"capture": weir.Capture("resid_post")}, 0, False, False),
        ({"capture": weir.Capture("resid_post", positions="4:")}, 4, False, False),
        ({"capture": weir.Capture("resid_post", positions="generated")}, P, False, False),
        ({"probes": PROBE}, 0, False, False),
        ({"interventions": weir.Add(V, 1)}, None, True, True),
        ({"interventions": weir.Add(V, 1, positions="generated")}, None, True, False),
        ({"interventions": weir.Add(V, 1, positions="sampled")}, None, True, True),
        ({"interventions": weir.Add(V, 1, when=weir.When("one", above=0)), "probes": PROBE}, 0, True, True),
    ],
)
def test_what_a_request_changes(asked, limit, changed, prompt_changed):
    assert of(**asked) == ExternalKV(limit, changed, prompt_changed)


@given(
    limit=st.none() | st.integers(0, 40),
    computed=st.integers(0, 20),
    loaded=st.integers(1, 20),
    more=st.integers(0, 20),
    is_async=st.booleans(),
)
def test_no_wanted_row_is_loaded(limit, computed, loaded, more, is_async):
    num_tokens = computed + loaded + more
    allowed = ExternalKV(limit).allows(computed, loaded, num_tokens, is_async)
    first_computed = computed + loaded
    if is_async and first_computed == num_tokens:
        first_computed -= 1  # vLLM computes the last token again
    assert allowed == (limit is None or first_computed <= limit)
