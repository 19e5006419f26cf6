"""Every refusal of `tests.support.refusals`, at its door, and as the routes of completions and chat answer it."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

import vllm_weir as weir
from tests.support import machine
from tests.support.hook_functions import probe_and_steer
from tests.support.refusals import ADMISSION, PARSE, refusals
from tests.support.sae_reference import weights
from tests.unit.admin_app import ADMIN, D, Server, Workers, app_of, serving
from vllm_weir.compat.http import translate
from vllm_weir.compat.rhizonymph.requests import KnownNames
from vllm_weir.compat.vllm_lens.request import to_weir
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.reachable import Vocabulary
from vllm_weir.server.context import current_response
from vllm_weir.server.request import WeirRequest

pytestmark = machine.needs(machine.module("vllm"))  # the wrapper of the routes is a patch of vLLM's
FEATURES = 12
PROMPT = [5, 6, 7, 8, 9]
REFUSALS = refusals(D, FEATURES)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Server:
    """One with an autoencoder, a vocabulary of 100 words, and room for 2,000 rows of a request."""
    folder = tmp_path_factory.mktemp("serve")
    sae = weir.SAE.from_tensors("jumprelu", ("resid_post", 1), **weights("jumprelu", 0, D, FEATURES))
    sae.save(folder / "sae")
    with serving(folder, engine=Workers(sae.nbytes), rows=2000) as (server,):
        server.frontend.engine.vocabulary = Vocabulary(100, SimpleNamespace(all_special_ids=[0], max_token_id=98))
        answer = TestClient(app_of(server), headers=ADMIN).put("/v1/saes/mood", json={"path": str(folder / "sae")})
        answer.raise_for_status()
        hook = weir.Hook(probe_and_steer, layers=[1, 2], args={"w": [0.5] * D, "scale": 3.0})
        server.frontend.names.register_hook("steer", hook)
        yield server


class OpenAIServingCompletion:
    """Stands for vLLM's, with an engine that only admits."""

    def __init__(self, server: Server, allow_loras: bool = False) -> None:
        self.engine_client = SimpleNamespace(_weir_server=server)
        self.models = SimpleNamespace(
            is_base_model=lambda name: name == "demo", lora_requests={"ours": SimpleNamespace(lora_path="/ours")}
        )
        self.entered = False

    def create_error_response(self, message: str, param: str | None = None) -> tuple[str, str | None]:
        return message, param

    async def create_completion(self, request: Any) -> None:
        self.entered = True
        extra = current_response.get().request.extra_args
        self.engine_client._weir_server.frontend.names.refresh()
        frontend = self.engine_client._weir_server.frontend
        frontend.admit("r", to_weir(extra, by_client=True), PROMPT, len(PROMPT), request.max_tokens)
        pytest.fail("it was admitted")


def answer(server: Server, asked: dict[str, Any]) -> tuple[str, str, OpenAIServingCompletion]:
    """(message, field) of the response to a body, and the serving class that made it."""
    from vllm_weir.patches import server as patches

    fields = {"vllm_xargs": None, "use_beam_search": False, "max_tokens": 6, "n": 1, "model": "demo"} | asked
    known = {name: fields.pop(name) for name in ("vllm_xargs", "use_beam_search", "max_tokens", "n", "model")}
    create = patches.create(OpenAIServingCompletion.create_completion, SimpleNamespace(serving_refusal=None))
    serving = OpenAIServingCompletion(server)
    return *asyncio.run(create(serving, SimpleNamespace(model_extra=fields, **known))), serving


@pytest.mark.parametrize("one", REFUSALS, ids=[f"{k}-{one.field[:30]}" for k, one in enumerate(REFUSALS)])
def test_each_is_refused_at_its_door_by_its_field(server, one):
    body = {name: value for name, value in one.asked.items() if name != "vllm_xargs"}
    names = KnownNames(server.frontend.names.vectors.module, D)

    def parsed():
        request = WeirRequest.parse(one.asked.get("vllm_xargs"), body, server.limits)
        return request and translate(request, body, names)

    if one.door == PARSE:
        with pytest.raises(WeirError) as caught:
            parsed()
        assert caught.value.field == one.field
    else:
        parsed()
    message, field, serving = answer(server, one.asked)
    assert field == one.field and message.startswith(f"{one.field}: ") and one.why in message
    assert serving.entered == (one.door == ADMISSION)


@pytest.mark.parametrize(
    ("lora", "field"),
    [
        ({"lora_name": "x", "lora_path": "/etc"}, "lora_request.lora_name"),
        ({"lora_name": "x"}, "lora_request.lora_name"),
        ({"lora_name": "ours", "lora_path": "/etc"}, "lora_request.lora_path"),
    ],
)
def test_no_path_of_a_client_is_opened_unless_the_operator_allows_it(server, monkeypatch, lora, field):
    monkeypatch.delenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", raising=False)
    message, named, _ = answer(server, {"lora_request": lora})
    assert named == field and re.match(re.escape(field), message)
