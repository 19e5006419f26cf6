"""``--weir-default-capture``: what it takes, what plain requests it refuses, and the files it leaves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.admin_app import D, serving
from tests.unit.refusals import refused
from tests.unit.server.test_response import DONE, View, chunk, failing, rewritten, told_of
from vllm_weir.compat import default_capture as module
from vllm_weir.compat.default_capture import DefaultCapture, load_given, put_option
from vllm_weir.errors import WeirError
from vllm_weir.results.activations import Activations
from vllm_weir.schema.hooks import Site
from vllm_weir.server.limits import DEFAULT_CAPTURE
from vllm_weir.server.request import WeirRequest
from vllm_weir.server.response import ResponseBuilder
from vllm_weir.storage import load

PATHS = dict(prompt=[3, 4, 5], prompt_embeds=None, n=None, use_beam_search=False, kv_transfer_params=None)


def body(**more: Any) -> Any:
    return SimpleNamespace(**PATHS | more)


def view(n: int = 3, begin: int = 0, request_id: str = "cmpl-1-0-abc") -> Any:
    """Rows of blocks 1 and 3, of `n` positions."""
    sites, at = [Site("resid_post", 1), Site("resid_post", 3)], torch.arange(begin, begin + n)
    rows = {site: torch.full((n, 4), float(site.layer)).bfloat16() for site in sites}
    acts = Activations(rows, dict.fromkeys(sites, at), dict.fromkeys(sites, at + 10))
    return View(
        activations=lambda: acts,
        pending=SimpleNamespace(request_id=request_id, admitted=View.pending.admitted),
    )


@pytest.mark.parametrize(
    ("text", "layers"), [("eagle3", "eagle3"), ("mtp", "mtp"), ("all", "all"), ("7, 1", [1, 7]), ("0", [0])]
)
def test_options(tmp_path: Path, text: str, layers: Any) -> None:
    environ: dict[str, str] = {}
    put_option([text], [], environ)
    assert json.loads(environ[DEFAULT_CAPTURE]) == {"layers": layers, "folder": ""}
    put_option([text], [str(tmp_path / "new")], environ)
    assert json.loads(environ[DEFAULT_CAPTURE])["folder"] == str(tmp_path / "new") and (tmp_path / "new").is_dir()


def test_wrong_options(tmp_path: Path) -> None:
    for text in ("eagle", "1,1", "-1", "1,x", ""):
        with refused("--weir-default-capture", "expected eagle3, mtp, all"):
            put_option([text], [], {})
    (tmp_path / "file").touch()
    for folder in ("s3://bucket/hs", str(tmp_path / "file")):
        with refused("--weir-default-capture-dir"):
            put_option(["mtp"], [folder], {})
    with refused("--weir-default-capture-dir", "says of which blocks"):
        put_option([], [str(tmp_path)], {})
    with refused("--weir-default-capture", "given twice"):
        put_option(["mtp", "mtp"], [], {})
    environ: dict[str, str] = {}
    put_option([], [], environ)
    assert not environ


def test_layers_are_those_of_the_model(tmp_path: Path) -> None:
    def start(layers: Any) -> Any:
        environ = {DEFAULT_CAPTURE: json.dumps({"layers": layers, "folder": str(tmp_path)})}
        asyncio.run(load_given(server, environ))
        return server.by_default.extra_args()["weir"]["capture"][0]["layers"]

    with serving(tmp_path) as (server,):
        blocks = server.frontend.engine.require_capabilities().num_layers
        assert D and start("mtp") == [blocks - 1] and start([0]) == [0]
        server.by_default = None
        with refused("--weir-default-capture", "block"):
            start([blocks])
        asyncio.run(load_given(server, {}))
        assert server.by_default is None
        asyncio.run(load_given(server, {DEFAULT_CAPTURE: json.dumps({"layers": "mtp", "folder": ""})}))
        (params, _) = server.by_default.request(body()).deposit(view())
        path = Path(params["kv_transfer_params"]["hidden_states_path"])
        assert path.is_file() and path.parent == server.directory.path / "hidden_states"
        server.by_default = None
        assert server.by_default is None


def test_plain_requests(tmp_path: Path) -> None:
    capture = DefaultCapture([1, 3], str(tmp_path))
    for prompt in ("text", ["text"], [3, 4], [[3, 4]], None):
        found = capture.request(body(prompt=prompt))
        asked = {"hook": "resid_post", "layers": [1, 3], "positions": "prompt"}
        assert found.extra_args == {"weir": {"v": 1, "capture": [asked]}} and found.deposit == capture.write
    whole = capture.request(body(kv_transfer_params={"include_output_tokens": True}))
    assert whole.extra_args["weir"]["capture"][0]["positions"] == "all"
    for name, value in (("prompt", ["a", "b"]), ("prompt", [[1], [2]]), ("n", 2), ("use_beam_search", True)):
        with refused(name, '"weir": {"v": 1}'):
            capture.request(body(**{name: value}))
    with refused("prompt_embeds"):
        capture.request(body(prompt_embeds=b"x"))
    with refused("kv_transfer_params.hidden_states_path"):
        capture.request(body(kv_transfer_params={"hidden_states_path": "/etc/x"}))


def test_a_file_is_that_of_vllms_connector(tmp_path: Path) -> None:
    fields, take_back = DefaultCapture([1, 3], str(tmp_path)).write(view())
    path = tmp_path / "cmpl-1-0-abc.safetensors"
    assert fields == {"kv_transfer_params": {"hidden_states_path": str(path)}}
    held = load_file(path)
    assert held["token_ids"].tolist() == [10, 11, 12] and held["hidden_states"].dtype == torch.bfloat16
    assert held["hidden_states"].tolist() == [[[1.0] * 4, [3.0] * 4]] * 3
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name, f"{path.name}.lock"]
    assert load(tmp_path)["cmpl-1-0-abc"]["resid_post", 3].shape == (3, 4)
    take_back()
    take_back()
    assert not list(tmp_path.glob("*.safetensors*"))


def test_a_file_stays_in_its_folder(tmp_path: Path) -> None:
    """Clients may choose a part of a request's id."""
    fields, _ = DefaultCapture([1, 3], str(tmp_path)).write(view(request_id="cmpl-/../../x-0-abc"))
    assert Path(fields["kv_transfer_params"]["hidden_states_path"]).parent == tmp_path


def test_nothing_is_left_of_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = DefaultCapture([1, 3], str(tmp_path))
    with refused("batch.positions", "at all positions"):
        capture.write(view(begin=1))
    monkeypatch.setattr(module, "publish_states", failing("no space left"))
    with pytest.raises(WeirError, match="no space left"):
        capture.write(view())
    assert not list(tmp_path.glob("*.safetensors*"))


def builder(server: Any, tmp_path: Path, *views: Any) -> ResponseBuilder:
    deposit = DefaultCapture([1, 3], str(tmp_path)).write
    made = ResponseBuilder(WeirRequest({}, 0, deposit=deposit), server)
    for choice, one in enumerate(views):
        made.add_view(choice, one)
    return made


def test_answers_name_the_file_and_have_nothing_else(tmp_path: Path) -> None:
    with serving(tmp_path) as (server,):
        whole, streamed = builder(server, tmp_path, view()), builder(server, tmp_path, view(request_id="b"))
        assert asyncio.run(whole.weir_objects()) == {}
        path = Path(whole.fields["kv_transfer_params"]["hidden_states_path"])
        assert path.exists()
        first, last, done = rewritten(streamed, chunk(), chunk("stop"), DONE)
        assert told_of(first) == chunk() and done == DONE
        assert told_of(last) == chunk("stop") | streamed.fields and (tmp_path / "b.safetensors").exists()
        whole.discard()
        assert not path.exists()


def test_rows_that_were_lost_are_an_error(tmp_path: Path) -> None:
    with serving(tmp_path) as (server,):
        lost = view()
        lost.wait = failing()
        with pytest.raises(WeirError, match="did not arrive"):
            asyncio.run(builder(server, tmp_path, lost).weir_objects())
        error, done = rewritten(builder(server, tmp_path, lost), chunk("stop"))
        assert "did not arrive" in told_of(error)["error"]["message"] and done == DONE
        assert not list(tmp_path.glob("*.safetensors*"))
