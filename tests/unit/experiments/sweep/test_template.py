"""`RequestTemplate`: its params ask what `weir.params` would, and the params that it was given stay as they are."""

from __future__ import annotations

import copy

import pytest
import torch
from vllm import SamplingParams

import vllm_weir as weir
from vllm_weir.experiments.sweep.cells import RequestTemplate
from vllm_weir.schema.keys import WIRE_KEY
from vllm_weir.schema.request import RequestSpec

CAPTURE = weir.Capture("resid_post", [1], "last_prompt")
ADD = weir.Add(torch.ones(4), 2, 0.5)


def spec_in(params: SamplingParams) -> RequestSpec:
    return RequestSpec.parse(params.extra_args[WIRE_KEY])


def test_it_asks_what_params_ask_and_the_fields_given():
    template = RequestTemplate(weir.params(SamplingParams(max_tokens=3), capture=CAPTURE, dose=True))
    wanted = spec_in(weir.params(SamplingParams(), capture=CAPTURE, interventions=ADD, dose=True))
    made = template.asking(interventions=wanted.interventions)
    assert made.max_tokens == 3
    assert made.extra_args[WIRE_KEY].to_json() == wanted.to_json()


def test_params_without_keys_ask_nothing_but_the_fields_given():
    wanted = spec_in(weir.params(SamplingParams(), capture=CAPTURE))
    made = RequestTemplate(SamplingParams(max_tokens=1)).asking(capture=wanted.capture)
    assert made.extra_args[WIRE_KEY].to_json() == wanted.to_json()


def test_requests_do_not_see_each_other_nor_change_what_was_given():
    given = weir.params(SamplingParams(extra_args={"other": 1}), capture=CAPTURE)
    before = copy.deepcopy(given.extra_args)
    template = RequestTemplate(given)
    steered = spec_in(weir.params(SamplingParams(), interventions=ADD)).interventions
    first, second = template.asking(interventions=steered), template.asking()
    first.extra_args["other"], first.max_tokens = 2, 99
    assert second.extra_args["other"] == 1 and second.max_tokens != 99
    assert not second.extra_args[WIRE_KEY].interventions and first.extra_args[WIRE_KEY].interventions
    assert given.extra_args == before


def test_malformed_keys_are_refused():
    with pytest.raises(weir.WeirError, match="capture"):
        RequestTemplate(SamplingParams(extra_args={WIRE_KEY: {"v": 1, "capture": 3}}))
