"""`weir.params`: what it makes of params that carry something already, and of what are no params."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import vllm_weir as weir
from vllm_weir.compat.probe_hook import HiddenStateRequest


def test_what_params_carry_already_stays_unless_it_is_given_anew():
    base = SimpleNamespace(extra_args={"other": 1})
    first = weir.params(base, capture=weir.Capture(layers=[0]), interventions=weir.Add(torch.ones(4), 1))
    steered = weir.params(first, capture=weir.Capture("mlp_out", 2)).extra_args
    assert [(c["hook"], c["layers"]) for c in steered["weir"]["capture"]] == [("mlp_out", [2])]
    assert [i["op"] for i in steered["weir"]["interventions"]] == ["add"]
    reading = weir.params(first, interventions=[]).extra_args
    assert [c["layers"] for c in reading["weir"]["capture"]] == [[0]] and reading["weir"]["interventions"] == []
    assert steered["other"] == reading["other"] == 1 and base.extra_args == {"other": 1}
    assert len(first.extra_args["weir"]["capture"]) == len(first.extra_args["weir"]["interventions"]) == 1


def test_a_tag_is_a_short_text():
    tagged = weir.params(SimpleNamespace(extra_args=None), tag="run 3, prompt 17")
    assert tagged.extra_args["weir"] == {"v": 1, "capture": [], "interventions": [], "tag": "run 3, prompt 17"}
    assert "tag" not in weir.params(tagged, tag="").extra_args["weir"]
    assert weir.params(tagged, dose=True).extra_args["weir"]["tag"] == "run 3, prompt 17"
    for wrong in (5, "a\nb", "x" * 257, ["a"]):
        with pytest.raises(weir.WeirError, match="a tag is a printable text of at most 256 characters") as e:
            weir.params(tagged, tag=wrong)
        assert e.value.field == "tag"


def test_what_cannot_carry_a_request_is_refused():
    with pytest.raises(weir.WeirError, match="SimpleNamespace has no extra_args") as e:
        weir.params(SimpleNamespace(beam_width=2), capture=weir.Capture())
    assert e.value.field == "sampling_params"


def test_the_drop_in_classes_keep_what_a_request_asks_for_itself():
    own = weir.params(
        weir.SamplingParams(), capture=weir.Capture("mlp_out", 2), interventions=weir.Add(torch.ones(4), 1)
    )
    wire = HiddenStateRequest.parse([5], False, True, False, False).add_capture(own).extra_args["weir"]
    assert [(c["hook"], c["layers"], c.get("positions")) for c in wire["capture"]] == [
        ("mlp_out", [2], None),
        ("resid_post", [5], "sampled"),
    ]
    assert [i["op"] for i in wire["interventions"]] == ["add"]


@pytest.mark.parametrize("layers", [[], (), range(0), torch.zeros(0, dtype=torch.int64)])
def test_the_drop_in_classes_refuse_to_give_no_block(layers):
    with pytest.raises(weir.WeirError, match="names no block; list some") as e:
        HiddenStateRequest.parse(layers, False, True, False, False)
    assert e.value.field == "layers"


@pytest.mark.parametrize("layers", [2, [2], torch.tensor(2), [torch.tensor(2)], np.array(2), (np.array(2),)])
def test_the_drop_in_classes_take_any_int(layers):
    assert HiddenStateRequest.parse(layers, False, True, False, False).layers == (2,)
    assert HiddenStateRequest.parse(["all"], False, True, False, False).layers == "all"


def test_arguments_come_in_the_order_that_the_design_prints():
    sink = {"filesystem": {"url": "/rows"}}
    capture = weir.Capture("resid_post", [1, 2], "prompt", True, "float16", "rp8", sink)
    named = weir.Capture(
        hook="resid_post", layers=[1, 2], positions="prompt", before=True, dtype="float16", compress="rp8", sink=sink
    )
    assert capture == named and named.to_json() == capture.to_json() and "reduce" not in capture.to_json()
    add = weir.Add([1.0, 0.0], 15, 4.0, "resid_pre", "generated", True)
    assert add.to_json() == {
        "op": "add", "hook": "resid_pre", "positions": "generated", "layers": [15], "scale": 4.0, "norm_match": True,
        "vector": add.vector.to_json(),
    }  # fmt: skip


def test_what_vllm_probe_hook_exports_comes_from_here_too():
    import vllm

    from vllm_weir import LLM, AsyncLLM, RequestOutput, SamplingParams

    assert (SamplingParams, RequestOutput) == (vllm.SamplingParams, vllm.RequestOutput)
    assert issubclass(LLM, vllm.LLM) and hasattr(AsyncLLM, "generate")


def test_an_engine_without_weir_is_told_as_requests_are(monkeypatch):
    from vllm_weir.patches.registry import PatchStatus

    monkeypatch.delenv("WEIR_DISABLE", raising=False)
    calls = (weir.sites, weir.sinks, weir.list, weir.clear_global)
    for call in calls:
        with pytest.raises(weir.WeirError, match="no engine that Weir serves"):
            call(SimpleNamespace())
    monkeypatch.setenv("WEIR_DISABLE", "1")
    for call in calls:
        with pytest.raises(weir.WeirError) as e:
            call(SimpleNamespace())
        assert (e.value.field, e.value.message) == ("weir", PatchStatus(active=False).refusal)
