"""What is refused over HTTP: what a client sends, the field that the error names, and at which door it is refused.

`tests/unit/server/test_refusals.py` goes through all of them, `tests/engine/test_serve.py` sends some to a server.
"""

from __future__ import annotations

import base64
import json
from typing import Any, NamedTuple

CAPTURE = {"v": 1, "capture": [{"hook": "resid_post", "layers": [1]}]}
PARSE, ADMISSION, ROUTE = "parse", "admission", "route"
"""Doors: the request's fields are read; an engine takes the request; the route itself, before and after reading."""


class Refusal(NamedTuple):
    """Attributes:
    asked: fields of a body for completions or chat, beside the model and the prompt.
    field: the one that is named.
    door: where it is refused.
    why: a part of the message.
    sent: whether it is one of the representatives that a real server gets, too.
    """

    asked: dict[str, Any]
    field: str
    door: str = PARSE
    why: str = ""
    sent: bool = False


def refusals(d_model: int, features: int) -> list[Refusal]:
    """All of them, for a model of at most 90 blocks.

    Args:
        features: how many the autoencoder `mood` has, the only one that is loaded.
    """
    add = {"op": "add", "vector": [0.5] * d_model, "layers": [3]}
    probe = {"kind": "linear", "name": "own", "weight": [0.5] * d_model, "layer": 2}
    setting = {"op": "set_feature", "name": "mood", "feature": 1, "value": 2.0}
    own_sink = {"filesystem": {"url": "/etc"}}
    as_text = json.dumps(CAPTURE)
    twice = '{"v": 1, "capture": [{"hook": "resid_post"}], "capture": []}'
    none_such = "is registered under 'nobody'"

    table = {"dtype": "float32", "shape": [1, d_model], "layer_indices": [2]}
    table["data"] = base64.b64encode(bytes(4 * d_model)).decode()
    source = {"kind": "inline", "packed": {"post_block": table}}
    two = {"kind": "inline", "packed": {"post_block": table, "pre_attn": table}}
    gate = {"when": {"kind": "always"}, "scope": "this_token", "apply": {"kind": "add", "steer": source}}
    found = {"kind": "probe", "probe": source, "threshold": 1.0}
    wrong_gates: list[tuple[dict, str, str]] = [
        ({"more": 1}, "steering[0].more", ""),
        ({"scope": "next_step"}, "steering[0].scope", "delay"),
        ({"scope": "rest_of_conversation"}, "steering[0].scope", "rest_of_request"),
        ({"scope": "ever"}, "steering[0].scope", "this_token"),
        ({"when": {"kind": "never"}}, "steering[0].when.kind", "always"),
        ({"when": {"kind": "always", "threshold": 1}}, "steering[0].when.threshold", ""),
        ({"when": found | {"sharpness": 0}}, "steering[0].when.sharpness", ""),
        ({"when": {"kind": "probe", "probe": source}}, "steering[0].when.threshold", "missing"),
        ({"when": found | {"threshold": "high"}}, "steering[0].when.above", ""),
        ({"when": found | {"probe": two}}, "steering[0].when.probe.packed", "one vector"),
        ({"when": found | {"probe": {"kind": "name", "name": 5}}}, "steering[0].when.probe", ""),
        ({"apply": {"kind": "attenuate", "strength": 0.5}}, "steering[0].apply.kind", "smaller scale"),
        ({"apply": {"kind": "clamp"}}, "steering[0].apply.kind", "gated clamps"),
        ({"apply": {"kind": "add", "steer": {"kind": "inline"}}}, "steering[0].apply.steer.packed", "at least"),
        ({"apply": {"kind": "add", "steer": {"kind": "name", "name": "x"}}}, "steering[0].apply.steer.name", "module"),
        ({"apply": {"kind": "add", "steer": source, "strength": "1"}}, "steering[0].apply.strength", ""),
    ]
    site = {"layer": 2, "hook": "post_block", "dest_position": 1, "source_module": "zeros"}
    wrong_patches: list[tuple[dict, str, str]] = [
        ({"more": 1}, "patch[0].more", ""),
        ({"layer": True}, "patch[0].layer", "int"),
        ({"hook": "nowhere"}, "patch[0].hook", ""),
        ({"dest_position": -1}, "patch[0].dest_position", "int"),
        ({"alpha": "1"}, "patch[0].alpha", ""),
        ({"source_module": None}, "patch[0].source_module", "none"),
        ({"source_inline": 0}, "patch[0].source_module", "give one"),
        ({"source_module": None, "source_inline": 0}, "patch[0].source_inline", "0 rows"),
        ({"source_module": None, "source_run": "r", "source_position": 0}, "patch[0].source_run", "capture the rows"),
        ({"source_module": "gone"}, "patch[0].source_module", "module"),
        ({"mask": {}}, "patch[0].mask", "indices or inline"),
        ({"mask": {"indices": [d_model]}}, "patch[0].mask.indices[0]", "values"),
        ({"mask": {"indices": [True]}}, "patch[0].mask.indices[0]", "int"),
        ({"mask": {"inline": 0}}, "patch[0].mask.inline", "0 rows"),
    ]

    def weir(**more: Any) -> dict[str, Any]:
        return {"weir": {"v": 1, **more}}

    def capture(*captures: Any) -> dict[str, Any]:
        return weir(capture=list(captures))

    def response(options: Any) -> dict[str, Any]:
        return {"weir": CAPTURE | {"response": options}}

    def steer(*interventions: Any) -> dict[str, Any]:
        return weir(interventions=list(interventions))

    read = [
        Refusal({"weir": "{"}, "weir", sent=True),
        *(Refusal({"weir": bad}, "weir") for bad in ("[1]", 5, [1], "9" * 5000, "[" * 100_000)),
        *(Refusal({place: {"weir": twice}}, "weir", why="comes twice") for place in ("vllm_xargs", "extra_args")),
        Refusal({"weir": twice}, "weir", why="comes twice"),
        Refusal({"weir": CAPTURE, "vllm_xargs": {"weir": as_text}}, "weir", why="given twice", sent=True),
        Refusal(
            {
                "vllm_xargs": {"output_residual_stream": "[1]"},
                "extra_args": {"output_residual_stream": [1]},
            },
            "output_residual_stream",
            why="given twice",
        ),
        Refusal(response({"xyz": 1}), "weir.response.xyz", sent=True),
        Refusal(response(5), "weir.response"),
        *(Refusal(response({"inline_bytes": n}), "weir.response.inline_bytes") for n in (-1, True, 1.5)),
        Refusal(response({"stream": 1}), "weir.response.stream"),
        # No path of a client becomes a sink, whichever place has it.
        Refusal(capture({"sink": own_sink}), "capture[0].sink", why="over HTTP", sent=True),
        Refusal(capture({}, {"sink": own_sink}), "capture[1].sink"),
        Refusal(weir(capture={"sink": own_sink}), "capture[0].sink"),
        Refusal({"vllm_xargs": {"weir": json.dumps(capture({"sink": own_sink})["weir"])}}, "capture[0].sink"),
        Refusal(weir(lens={"kind": "tuned", "path": "/etc"}), "lens.path", why="over HTTP"),
        Refusal(weir(lens=[{}, {"kind": "tuned", "path": "/etc"}]), "lens[1].path", why="over HTTP"),
        Refusal(weir(lens=[{}, {"top_k": 3}]), "lens[1]", ADMISSION, why="two lenses are called 'logit'"),
        Refusal(weir(probes=[probe | {"name": "sites"}]), "probes[0].name"),
        # Where nobody reads them, or in another's words.
        Refusal({"wier": CAPTURE}, "wier", why="did you mean 'weir'?", sent=True),
        Refusal({"vllm_xargs": {"Weir": as_text, "mine": 1}}, "Weir"),
        Refusal({"vllm_xargs": {"output_residual_streams": [1]}}, "output_residual_streams"),
        Refusal({"weir": CAPTURE, "extra_args": {"apply_steering_vector": []}}, "apply_steering_vector"),
        Refusal({"capture": [{"hook": "resid_post"}]}, "capture", sent=True),
        Refusal({"extra_body": {"weir": {"v": 1}}}, "extra_body.weir", why="extra_body is"),
        Refusal({"extra_body": {"steering_name": "m"}}, "extra_body.steering_name", why="extra_body is"),
        Refusal({"output_residual_stream": [1]}, "output_residual_stream", why="belongs"),
        Refusal({"apply_steering_vectors": []}, "apply_steering_vectors", why="belongs"),
        Refusal({"vllm_xargs": {"steering_name": "m"}}, "vllm_xargs.steering_name", why="belongs"),
        Refusal({"vllm_xargs": {"steering_vectors": "{}"}}, "vllm_xargs.steering_vectors", why="belongs"),
        # Code, and what vLLM makes of true.
        Refusal({"vllm_xargs": {"apply_hooks": "[]"}}, "apply_hooks", why="code never comes over HTTP", sent=True),
        Refusal({"extra_args": {"apply_hooks": []}}, "apply_hooks"),
        Refusal({"vllm_xargs": {"output_residual_stream": 7}}, "output_residual_stream"),
        # The fork's fields.
        Refusal({"steering_name": 1}, "steering_name"),
        Refusal(weir(response={"values": "pickle"}), "weir.response.values", why="'numbers' or 'b64'"),
        Refusal({"steering_vectors": 1}, "steering_vectors"),
        Refusal({"steering_vectors": {"\ud800": {"1": add["vector"]}}}, r"steering_vectors.\ud800.1.hook", sent=True),
        Refusal({"steering_vectors": {"nowhere": {}}}, "steering_vectors.nowhere"),
        Refusal({"capture_wait": True}, "capture_wait", why="leave it out"),
        Refusal({"conversation_id": "c", "steering_name": "m"}, "conversation_id", why="no state"),
        Refusal({"extra_body": {"patch": [site]}}, "extra_body.patch", why="extra_body is"),
        Refusal({"vllm_xargs": {"steering": [gate]}}, "vllm_xargs.steering", why="belongs"),
        *(Refusal({"steering": [gate | more]}, field, why=why) for more, field, why in wrong_gates),
        *(Refusal({"patch": [site | more]}, field, why=why) for more, field, why in wrong_patches),
        Refusal({"steering": [gate] * 1025}, "steering", why="more than the limit"),
        Refusal(
            {"steering": [gate | {"apply": {"kind": "add", "steer": two}}] * 600}, "steering[512]", why="vectors in"
        ),
        Refusal({"patch": [site] * 1025}, "patch", why="more than the limit"),
        Refusal({"steering": [gate, 5]}, "steering[1]", why="expected an object", sent=True),
        Refusal({"patch": [site, 5]}, "patch[1]"),
        Refusal({"patch": table}, "patch", why="expected a list"),
        Refusal({"patch": [site], "patch_vectors": [{}]}, "patch_vectors"),
        Refusal({"patch_vectors": {"dtype": "float32", "shape": [1, 2], "data": "!"}}, "patch_vectors.b64"),
        Refusal(
            {"decode_steering_clamps": {"resid_post": {"1": add["vector"]}}},
            "decode_steering_clamps.resid_post.1[0]",
        ),
    ]
    taken = [
        Refusal({"weir": {}}, "weir.v", sent=True),
        Refusal(weir() | {"weir": {"v": 2}}, "weir.v"),
        Refusal(weir(captures=[]), "weir.captures"),
        Refusal(weir(**{"\ud800": 1}), r"weir.\ud800", sent=True),
        Refusal(capture({"hook": "resid_post", "layers": [99]}), "capture[0].layers", why="block 99", sent=True),
        Refusal(capture({"hook": "nowhere"}), "capture[0].hook"),
        Refusal(capture({"layers": []}), "capture[0].layers"),
        Refusal(capture({"positions": []}), "capture[0].positions"),
        Refusal(capture({}, {"positions": [300, 400]}), "capture[1].positions", sent=True),
        Refusal(capture({"positions": {"special": "no"}}), "capture[0].positions.special"),
        Refusal(capture({"hook": "resid_post", "sink": "nosuch"}), "capture[0].sink", sent=True),
        Refusal(
            capture(*({"hook": hook} for hook in ("resid_pre", "attn_out", "resid_post", "mlp_out")))
            | {"max_tokens": 240},
            "capture",
            sent=True,
        ),
        Refusal(
            capture({"hook": "resid_post", "layers": [0], "project": [[1.0] * d_model] * 256}) | {"max_tokens": 500},
            "capture",
            why="numbers would come back",
        ),
        Refusal(
            {
                "extra_args": {
                    "apply_steering_vectors": [
                        {"activations": [add["vector"]], "layer_indices": [1], "position_indices": list(range(65_536))}
                    ]
                    * 5
                }
            },
            "apply_steering_vectors[4].position_indices",
            why="list 327680 positions",
        ),
        *(
            Refusal(steer(*[add | {"positions": positions}] * 5), "interventions", why="list 327680 positions")
            for positions in (list(range(65_536)), {"token_ids": [5] * 65_536})
        ),
        Refusal(steer(add | {"positions": "generated"}) | {"max_tokens": 1}, "interventions[0].positions", sent=True),
        Refusal(steer(add | {"positions": {"token_ids": [9999]}}), "interventions[0].positions.token_ids", sent=True),
        Refusal(steer(add | {"vector": [1.0]}), "interventions[0].vector"),
        Refusal(steer(add | {"vector": {"ref": "nobody"}}), "interventions[0].vector", why=none_such, sent=True),
        Refusal({"patch": [site | {"layer": 99}]}, "patch[0].layers", sent=True),
        Refusal({"patch": [site | {"dest_position": 300}]}, "patch[0].positions", sent=True),
        Refusal(
            {"steering": [gate | {"when": found | {"probe": {"kind": "name", "name": "x"}}}]},
            "steering[0].when.probe",
            sent=True,
        ),
        Refusal(steer({"op": "pickle"}), "interventions[0].op"),
        Refusal(
            steer({"op": "add", "vector": [[1.0] * d_model] * 2}),
            "interventions[0].positions",
            why="2 rows, but 'all' is open",
        ),
        Refusal(weir(modules=["gone"]), "modules[0]", sent=True),
        Refusal(
            {"decode_steering_vectors": {"resid_post": {"3": add["vector"]}}, "max_tokens": 1},
            "decode_steering_vectors.resid_post.3.positions",
            sent=True,
        ),
        # A field of the fork's stands for entries before Weir's own.
        Refusal({"steering_name": "gone"}, "steering_name"),
        Refusal({"steering_vectors": {"resid_post": {"1": [1.0]}}}, "steering_vectors.resid_post.1.vector"),
        Refusal(
            {"steering_vectors": {"resid_post": {"1": add["vector"]}}} | steer(add, add | {"layers": [99]}),
            "interventions[1].layers",
        ),
        Refusal({"vllm_xargs": {"output_residual_stream": "[99]"}}, "output_residual_stream.layers"),
        Refusal({"extra_args": {"apply_steering_vectors": [1]}}, "apply_steering_vectors[0].activations"),
        Refusal(weir(routing=True), "routing", why="no routing is served", sent=True),
        Refusal(weir(routing={"prompt_start": -1}), "routing.prompt_start"),
        Refusal(weir(routing="all"), "routing"),
        Refusal(weir(routing={"array": "no base64"}), "routing.array"),
        Refusal(weir(routing={"start": 1}), "routing.start"),
        Refusal(weir(hooks=["nobody"]), "hooks[0].name", why="no hook is registered", sent=True),
        Refusal(weir(hooks=[{"name": "steer", "function": "gASV"}]), "hooks[0].function", why="--weir-hook", sent=True),
        Refusal(steer({"op": "hook", "source": "def f(): pass"}), "interventions[0].source", why="--weir-hook"),
        Refusal(weir(hooks=[{"args": {}}]), "hooks[0].name", why="missing"),
        Refusal(weir(hooks=[{"name": "steer", "args": {"w": [1.0]}}]), "hooks[0].args.w", why="got [1]", sent=True),
        Refusal(weir(hooks=[{"name": "steer", "args": {"v": 1}}]), "hooks[0].args.v", why="no such arg"),
        Refusal(weir(hooks=[{"name": "steer", "args": {"scale": 10**400}}]), "hooks[0].args.scale", why="64 bits"),
        Refusal(weir(hooks=[{"name": "steer", "layers": [99]}]), "hooks[0].layers", sent=True),
        Refusal(weir(hooks=[add]), "hooks[0]", why="belongs in interventions"),
        Refusal(weir(hooks=["steer"] * 1025), "hooks", why="more than the limit"),
        Refusal(weir(probes=["nobody"]), "probes[0]", sent=True),
        Refusal(weir(probes=[probe | {"weight": [1.0]}]), "probes[0].weight"),
        Refusal(weir(probes=[probe], stop_when="own"), "stop_when"),
        Refusal(weir(stop_when="nobody > 1"), "stop_when", sent=True),
        Refusal(
            weir(features=[{"name": "mood", "top_k": 5}, {"name": "other"}]),
            "features[1].name",
            why="loaded are mood",
            sent=True,
        ),
        Refusal(
            weir(features=[{"name": "mood", "top_k": features + 1}]),
            "features[0].top_k",
            why=f"has {features} features",
        ),
        Refusal(
            weir(features=[{"name": "mood", "ids": [features]}]), "features[0].ids", why=f"from 0 to {features - 1}"
        ),
        Refusal(weir(features=[{"name": "mood", "k": 3}]), "features[0].k", why="unknown"),
        Refusal(steer(setting, setting | {"name": "other"}), "interventions[1].name", why="loaded are mood"),
        Refusal(
            steer(setting | {"feature": features}),
            "interventions[0].feature",
            why=f"from 0 to {features - 1}",
            sent=True,
        ),
        Refusal(steer(setting | {"scale": 2.0}), "interventions[0].value", why="one of value"),
    ]
    at_route = [
        Refusal({"weir": CAPTURE, "use_beam_search": True, "n": 2}, "use_beam_search", sent=True),
        Refusal({"lora_request": "x"}, "lora_request", sent=True),
        Refusal({"lora_request": {"lora_path": "/etc"}}, "lora_request.lora_name", sent=True),
        Refusal({"lora_request": {"lora_name": "x", "lora_path": 5}}, "lora_request.lora_path"),
        Refusal({"lora_request": {"lora_name": "x", "path": "/etc"}}, "lora_request.path"),
    ]
    return [
        *read,
        *(one._replace(door=ADMISSION) for one in taken),
        *(one._replace(door=ROUTE) for one in at_route),
    ]
