"""``weir serve --weir-default-capture``: a trainer of draft models finds the rows of its plain requests in files.

The steps of the clients of speculators and hs-connectors 0.9.0 are restated here: `generate_hidden_states`, the
`FileTransfer` of the backend ``file``, and what `generate-offline-data` does with a file. Where hs-connectors is
installed, its own `FileTransfer` reads.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import OpenAI
from safetensors.torch import load_file

import vllm_weir as weir
from tests.engine.serving import API_KEY, ARGS, CHAT, COMPLETIONS, PATHS, WEIR, events, post, rows_of, running
from tests.support.machine import engine_processes, needs
from tests.support.measure import rel_err
from tests.support.oracle import Oracle

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), needs(engine_processes)]
CLOSE_OTHERS = True
BOUND = 1e-5
LAYERS = [1, 2, 5]
"""EAGLE-3's of the shipped model's six blocks: 2, 3 and 6 in vLLM's numbering."""
IDS = [[10, 20, 30, 40, 50], list(range(5, 75)), [9]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Path]]:
    folder = tmp_path_factory.mktemp("default")
    more = ("--weir-default-capture", "eagle3", "--weir-default-capture-dir", str(folder / "states"))
    stream = {"address": str(folder / "socket"), "token_file": str(folder / "token")}
    sinks = {"trainer": {"stream": stream, "policy": "block"}}
    more += ("--additional-config", json.dumps({"weir": {"sinks": sinks}}))
    with running(folder / "log", WEIR, *more, forked=True, args=ARGS) as http:
        yield http, folder / "states"


def generated(params: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`FileTransfer.get_generated`."""
    if importlib.util.find_spec("hs_connectors") is not None:
        from hs_connectors import FileTransfer

        return FileTransfer(Path()).get_generated(params)
    return load_file(params.get("hidden_states_path") or params.get("handle"))


def named(answer: Any, token_ids: list[int]) -> tuple[str, dict[str, Any]]:
    """`extract_output`."""
    of = answer.choices[0] if answer.object == "text_completion" else answer
    assert of.prompt_token_ids == token_ids
    params = answer.kv_transfer_params
    return params.get("hidden_states_path") or params.get("handle"), params


def check(data: dict[str, torch.Tensor], tokens: list[int]) -> None:
    """`check_hidden_states`."""
    assert data["token_ids"].tolist() == tokens and len(tokens) == data["hidden_states"].shape[0]
    assert torch.isfinite(torch.stack(torch.aminmax(data["hidden_states"]))).all()


def test_the_trainers_client_finds_its_rows(server, tmp_path: Path) -> None:
    http, folder = server
    truth = Oracle(weir.demo_model())
    with OpenAI(base_url=str(http.base_url.join("/v1")), api_key=API_KEY, max_retries=0) as client:
        model = client.models.list().data[0].id
        for index, ids in enumerate(IDS):
            answer = client.completions.create(
                model=model, prompt=ids, max_tokens=1, extra_body={"return_token_ids": True}
            )
            handle, params = named(answer, ids)
            found = generated(params)
            check(found, ids)
            assert Path(handle).parent == folder and not Path(handle).name.startswith("hs_")
            rows = truth.rows(ids, [("resid_post", layer) for layer in LAYERS])
            expected = torch.stack([rows["resid_post", layer] for layer in LAYERS], dim=1)
            assert found["hidden_states"].dtype == torch.float32 and rel_err(found["hidden_states"], expected) <= BOUND
            target = tmp_path / f"hs_{index}.safetensors"
            shutil.move(handle, target)
            check(load_file(target), ids)
        messages = [{"role": "user", "content": "Tom went to the garden."}]
        extra = {"add_generation_prompt": False, "continue_final_message": False, "return_token_ids": True}
        chat = client.chat.completions.create(model=model, messages=messages, max_tokens=1, extra_body=extra)
    handle, params = named(chat, chat.prompt_token_ids)
    check(generated(params), chat.prompt_token_ids)
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as vllm_s

    check(vllm_s.load_hidden_states(handle), chat.prompt_token_ids)
    vllm_s.cleanup_hidden_states(handle)
    assert not list(folder.glob(f"{Path(handle).name}*"))


@pytest.mark.parametrize("path", PATHS)
def test_streams_name_the_file_in_their_last_chunk(server, path: str) -> None:
    http, _ = server
    told = events(http, path, return_token_ids=True)
    (last,) = (chunk for chunk in told if "kv_transfer_params" in chunk)
    assert last["choices"][0]["finish_reason"] == "length" and "weir" not in last["choices"][0]
    found = generated(last["kv_transfer_params"])
    assert found["token_ids"].tolist() == post(http, path, return_token_ids=True, max_tokens=1).get(
        "prompt_token_ids", found["token_ids"].tolist()
    )


def test_generated_tokens_come_with_vllms_own_key(server) -> None:
    """All but the last, which was never an input."""
    http, _ = server
    answer = post(http, prompt=IDS[0], return_token_ids=True, kv_transfer_params={"include_output_tokens": True})
    check(generated(answer["kv_transfer_params"]), IDS[0] + answer["choices"][0]["token_ids"][:-1])


def test_requests_with_weirs_keys_say_themselves_what_is_captured(server, tmp_path: Path) -> None:
    http, folder = server
    before = sorted(folder.iterdir())
    asked = {"v": 1, "capture": [{"hook": "resid_post", "layers": LAYERS, "positions": "prompt"}]}
    answer = post(http, prompt=IDS[0], weir=asked)
    assert answer["kv_transfer_params"] is None and sorted(folder.iterdir()) == before
    rows = rows_of(http, answer["choices"][0], tmp_path)
    assert post(http, n=2, temperature=1, weir={"v": 1})["kv_transfer_params"] is None
    found = generated(post(http, prompt=IDS[0])["kv_transfer_params"])["hidden_states"]
    assert torch.equal(found, torch.stack([rows["resid_post", layer] for layer in LAYERS], dim=1))


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (COMPLETIONS, "n", 2),
        (CHAT, "n", 2),
        (COMPLETIONS, "prompt", ["Tom", "Anna"]),
        (COMPLETIONS, "use_beam_search", True),
        (COMPLETIONS, "kv_transfer_params", {"hidden_states_path": "/tmp/x"}),
    ],
)
def test_what_one_file_cannot_hold_is_refused(server, path: str, field: str, value: Any) -> None:
    http, folder = server
    before = sorted(folder.iterdir())
    error = post(http, path, 400, **{field: value})["error"]
    assert error["param"].startswith(field) and sorted(folder.iterdir()) == before


def test_a_sink_streams_rows_of_requests_to_a_trainer(server, tmp_path: Path) -> None:
    """Each request once, in the order in which they finish; the receipt has its number in the stream."""
    http, folder = server
    rows = weir.StreamedRows(str(folder.parent / "socket"), (folder.parent / "token").read_text())
    capture = {"hook": "resid_post", "layers": LAYERS, "positions": "all"}
    batches = iter(rows)
    for number, ids in enumerate(IDS):
        told = post(http, prompt=ids, weir={"v": 1, "capture": [capture | {"sink": "trainer"}]})["choices"][0]["weir"]
        assert told["receipt"]["sinks"] == {"trainer": "written"}
        assert told["receipt"]["files"] == [f"socket#{number}"] and "activations" not in told
        batch = next(batches)
        assert batch.requests.tolist() == [number] * (len(ids) + 5) and batch.token_ids[: len(ids)].tolist() == ids
        here = rows_of(http, post(http, prompt=ids, weir={"v": 1, "capture": [capture]})["choices"][0], tmp_path)
        for layer in LAYERS:
            assert torch.equal(batch.rows["resid_post", layer], here["resid_post", layer])
        del batch
