"""What a request body asks of Weir; what is refused is in `test_refusals`."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
import torch
import zstandard

import vllm_weir as weir
from tests.unit.refusals import refused
from vllm_weir.cli.serve import all_plugins, prepare
from vllm_weir.compat.http import translate
from vllm_weir.compat.vllm_lens import request as vllm_lens
from vllm_weir.compat.vllm_lens.request import lens_interventions
from vllm_weir.compat.vllm_lens.tensors import serialize_tensor as encode
from vllm_weir.errors import WeirError
from vllm_weir.schema.keys import asks
from vllm_weir.server.limits import ServerLimits
from vllm_weir.server.request import WeirRequest

LIMITS = ServerLimits()
WISH = {"v": 1, "capture": [{"hook": "resid_post", "layers": [1]}]}


def parse(xargs=None, body=None, limits=LIMITS):
    request = WeirRequest.parse(xargs, body, limits)
    return request and translate(request, body or {})


def test_every_place_says_the_same():
    as_text = parse({"weir": json.dumps(WISH)})
    assert as_text == parse(None, {"weir": WISH}) == parse({}, {"extra_args": {"weir": WISH}})
    assert as_text.extra_args == {"weir": WISH} and as_text.own and not as_text.answer


@pytest.mark.parametrize("body", [None, {}, {"user": 1}, {"extra_args": 5}, {"weir": None}])
def test_a_plain_request_asks_for_nothing(body):
    assert not asks({"session_id": "x"}, body)
    assert parse({"session_id": "x"}, body) is None


def test_the_response_options_are_taken_off_and_capped():
    ask = parse(None, {"weir": WISH | {"response": {"inline_bytes": 1 << 40, "stream": True}}})
    assert ask.extra_args == {"weir": WISH}
    assert ask.inline_bytes == LIMITS.inline_bytes and ask.stream
    assert parse(None, {"weir": WISH}).inline_bytes == LIMITS.inline_default
    assert parse(None, {"weir": WISH | {"response": {"inline_bytes": 0}}}).inline_bytes == 0


def test_other_keys_there_are_not_weirs():
    assert not asks({"mine": 1}, {"extra_body": {"mine": 1}}) and not asks(None, {"extra_body": "x", "weir": None})


def test_lens_text_with_a_key_that_comes_twice_is_refused():
    """Of JSON text the first was ignored without a word."""
    with pytest.raises(WeirError, match="comes twice"):
        lens_interventions('[{"activations": [[1.0]], "layer_indices": [0], "scale": 1, "scale": 2}]')


def test_a_client_names_a_sink_of_the_operator():
    assert parse(None, {"weir": WISH | {"capture": [{"sink": "archive"}]}}) is not None


@pytest.mark.parametrize(("value", "means"), [(1, True), (1.0, True), (0, False), ([1, 2], [1, 2]), ("true", "true")])
def test_what_vllm_makes_of_true_is_still_every_block(value, means):
    ask = parse({"output_residual_stream": value})
    assert ask.extra_args == {"output_residual_stream": means} and ask.answer and not ask.own


def lens_json(tensor, **more):
    vector = {"activations": encode(tensor) | more, "layer_indices": list(range(len(tensor)))}
    return json.dumps([vector])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lens_tensors_travel_both_ways(dtype):
    tensor = torch.randn(2, 8).to(dtype)
    form = encode(tensor)
    assert torch.equal(weir.deserialize_tensor(form), tensor)
    raw = zstandard.ZstdDecompressor().decompress(base64.b64decode(form["data"]))
    back = torch.from_numpy(np.frombuffer(raw, form["dtype"]).reshape(form["shape"]).copy())
    back = back.view(torch.bfloat16) if form["original_dtype"] == "torch.bfloat16" else back
    assert back.dtype == dtype and torch.equal(back, tensor)
    moves = lens_interventions(lens_json(tensor))
    assert [m.layers for m in moves] == [(0,), (1,)] or [list(m.layers) for m in moves] == [[0], [1]]
    for move, row in zip(moves, tensor, strict=True):
        assert np.array_equal(np.ravel(move.vector.array), row.float().numpy())


def test_damaged_lens_tensors_are_refused_and_old_ones_read():
    form = encode(torch.randn(2, 8))
    assert weir.decode_activations({}) == weir.decode_activations({"activations": None}) == {}
    (back,) = weir.decode_activations({"activations": weir.serialize_activations({"x": torch.ones(3)})}).values()
    assert torch.equal(back, torch.ones(3))
    old = {"data": base64.b64encode(np.ones((1, 2), np.float32)).decode(), "dtype": "float32", "shape": [1, 2]}
    low = weir.deserialize_tensor(old | {"original_dtype": "torch.float16"})
    assert weir.deserialize_tensor(old).tolist() == low.tolist() == [[1.0, 1.0]] and low.dtype == torch.float16
    bomb = base64.b64encode(zstandard.ZstdCompressor().compress(bytes(1 << 20))).decode()
    for damage in ({"shape": [2, 9]}, {"shape": [-2, -8]}, {"data": "!!"}, {"data": bomb}, {"dtype": "O"},
                   {"shape": None}, {"original_dtype": "torch.load"}, {"shape": [1 << 70]}):  # fmt: skip
        with refused("activations"):
            weir.deserialize_tensor(form | damage)
    with refused("activations"):
        weir.deserialize_tensor(None)


def test_a_bomb_is_not_inflated(monkeypatch):
    monkeypatch.setattr(vllm_lens, "MAX_ELEMENTS", 1 << 10)
    bomb = base64.b64encode(zstandard.ZstdCompressor().compress(bytes(1 << 20))).decode()
    with pytest.raises(WeirError) as e:
        lens_interventions(lens_json(torch.zeros(1, 8), data=bomb))
    assert e.value.field == "apply_steering_vectors[0].activations.data"
    for bad in ("!!", base64.b64encode(b"no frame").decode(), 5):
        with pytest.raises(WeirError):
            lens_interventions(lens_json(torch.zeros(1, 8), data=bad))


def test_the_command_s_arguments_and_environment(tmp_path):
    environ, file = {}, tmp_path / "key"
    file.write_text("k\n")
    assert prepare(["m", "--weir-admin-key-file", str(file), "--port", "1"], environ) == ["m", "--port", "1"]
    assert environ["WEIR_ADMIN_KEY"] == "k" and "weir" in environ["VLLM_PLUGINS"].split(",")
    assert set(environ["VLLM_PLUGINS"].split(",")) == set(all_plugins())
    modules = ["--steering-modules", "a=/x=y.json", '{"name": "b", "path": "/z"}', "--steering-modules=c=/c", "--port"]
    assert prepare(["m", *modules, "1"], environ) == ["m", "--port", "1"]
    assert json.loads(environ["WEIR_SERVE_MODULES"]) == {"a": "/x=y.json", "b": "/z", "c": "/c"}
    environ = {"VLLM_PLUGINS": "a,weir"}
    file.write_text("k=2")
    assert prepare(["m", f"--weir-admin-key-file={file}"], environ) == ["m"] and environ["WEIR_ADMIN_KEY"] == "k=2"
    assert environ["VLLM_PLUGINS"] == "a,weir"


@pytest.mark.parametrize(
    ("arguments", "environ", "field"),
    [
        (["m", "--weir-admin-key"], {}, "--weir-admin-key"),
        (["m", "--weir-admin-key", "k"], {}, "--weir-admin-key"),  # `ps` shows it to everybody
        (["m", "--weir-admin-key=k"], {"WEIR_ADMIN_KEY": "k"}, "--weir-admin-key"),
        (["m", "--weir-admin-key-file", "/none"], {}, "--weir-admin-key-file"),
        (["m", "--weir-admin-key-file", "/dev/null"], {}, "--weir-admin-key-file"),
        (["m", "--weir-admin-key-file", "/dev/zero"], {}, "--weir-admin-key-file"),
        (["m"], {"VLLM_PLUGINS": "lora_filesystem_resolver"}, "VLLM_PLUGINS"),
        (["m"], {"VLLM_PLUGINS": ""}, "VLLM_PLUGINS"),
        (["m"], {"WEIR_DISABLE": "1"}, "WEIR_DISABLE"),
        (["m"], {"VLLM_USE_RUST_FRONTEND": "1"}, "VLLM_USE_RUST_FRONTEND"),
        (["m"], {"WEIR_SERVE_ROWS": "many"}, "WEIR_SERVE_ROWS"),
        (["m"], {"WEIR_ADMIN_KEY": "from-a-file\n"}, "WEIR_ADMIN_KEY"),  # every right key would be a wrong one
        (["m"], {"WEIR_ADMIN_KEY": " k"}, "WEIR_ADMIN_KEY"),
        (["--steering-modules", "a=/x", "m"], {}, "--steering-modules"),
        (["m", "--steering-modules", "a=/x", "a=/y"], {}, "--steering-modules"),
        (["m", "--steering-modules", '{"name": "a"}'], {}, "--steering-modules"),
    ],
)
def test_the_command_does_not_start_without_weir(arguments, environ, field):
    with pytest.raises(WeirError) as e:
        prepare(arguments, environ)
    assert e.value.field == field


@pytest.mark.parametrize("asked", ["-h", "--help", "--help=all", None])
def test_help_names_weir_s_own_option(monkeypatch, capsys, asked):
    from vllm_weir.cli import serve
    from vllm_weir.patches import serve_command

    given = []
    monkeypatch.setattr(serve_command, "vllm_serve", given.append)
    monkeypatch.setattr(serve, "prepare", lambda arguments, environ: arguments)
    monkeypatch.setattr(serve.atexit, "register", lambda *_: None)
    arguments = ["m", *([asked] if asked else [])]
    serve.serve(arguments)
    assert given == [arguments]
    printed = capsys.readouterr().out
    assert ("--weir-admin-key-file PATH" in printed and "WEIR_ADMIN_KEY" in printed) == bool(asked)
