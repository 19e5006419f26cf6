"""What the prefix-cache keys of steered blocks are made of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.unit.frontends import frontend_of
from tests.unit.request_strategies import served
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.patches.scheduler import block_hash_extra_keys

D = 4
FACTS = EngineCapabilities(served(2), 2, D, "float32", 1024)


class Hashed(SimpleNamespace):
    """A request as the block hasher sees it."""

    __hash__ = object.__hash__


@pytest.fixture
def engine_request():
    frontend = frontend_of(FACTS)
    wire = {"weir": {"v": 1, "interventions": [{"op": "add", "vector": [1.0] * D, "layers": [1]}]}}
    yield lambda: frontend.admit("r", wire, [1, 2, 3], 3, 4)[1]
    frontend.close()


def test_a_salt_keeps_requests_from_blocks_under_another(engine_request):
    hasher = block_hash_extra_keys(lambda request, start, end: (None, start), None)

    def key_under(salt):
        asked = engine_request()
        asked.cache_salt = salt
        params = SimpleNamespace(extra_args={"weir": asked})
        return hasher(Hashed(sampling_params=params, num_prompt_tokens=3, all_token_ids=[1, 2, 3]), 0, 3)[0]

    assert key_under("") == key_under("") and key_under("one") == key_under("one")
    assert len({key_under(""), key_under("one"), key_under("another")}) == 3
