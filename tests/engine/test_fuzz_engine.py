"""Arbitrary wishes on a live engine: refused with the field's name or honoured in full, and the engine goes on."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given

import vllm_weir as weir
from tests.engine.common import BOUND, asking, frontend, prompts, reached, sampling, scheduler, verify
from tests.support.properties import examples
from tests.unit.request_strategies import any_extra_args, sensible_captures

pytestmark = pytest.mark.engine("default")
FUZZ = examples(120, *HealthCheck, database=None)
LAYERS = 4


@FUZZ
@given(extra_args=any_extra_args(LAYERS, deepest=90))  # deeper, and vLLM cannot copy its own parameters
def check_refused_or_honoured(llm, truth, seen, extra_args):
    params = sampling(2, extra_args=extra_args)
    try:
        (out,) = llm.generate(prompts([6]), params, use_tqdm=False)
    except weir.WeirError as e:
        assert e.field, e
        assert not llm.llm_engine.has_unfinished_requests() and not scheduler(llm).requests
        seen["refused"] += 1
        return
    assert len(out.outputs[0].token_ids) == 2
    acts = out.activations
    ids = list(out.prompt_token_ids) + list(out.outputs[0].token_ids)
    reference = truth.rows(ids[:-1], map(tuple, acts.sites)) if acts is not None else {}
    for site in acts.sites if acts is not None else ():
        at = acts.positions_of(*site)
        assert at.tolist() == sorted(set(at.tolist()))
        rows = acts[site].float()
        bound = BOUND if acts[site].dtype.itemsize == 4 else 1e-2
        if len(at) and acts.is_compressed:  # how near they come is tests/engine/test_compress.py's to say
            assert rows.isfinite().all() and len(acts.compressed(site)[0]) == len(at)
        elif len(at):
            expected = reference[tuple(site)][at]
            assert (rows - expected).abs().max() <= bound * expected.abs().max()
    seen["honoured"] += 1


@FUZZ
@given(captures=sensible_captures(LAYERS))
def check_honoured(llm, truth, seen, captures):
    capture = [weir.Capture(hook, layers, positions) for hook, layers, positions in captures]
    wanted: dict = {}
    for hook, layers, positions in captures:
        for layer in range(LAYERS) if layers == "all" else layers:
            wanted.setdefault((hook, layer), []).append(positions)
    params = weir.params(sampling(3), capture=capture)
    if not all(reached(positions, 6, 3) for _, _, positions in captures):
        with pytest.raises(weir.WeirError, match="selects no row"):
            llm.generate(prompts([6]), params, use_tqdm=False)
        seen["unreached"] += 1
        return
    (out,) = llm.generate(prompts([6]), params, use_tqdm=False)
    verify(out, wanted, truth)
    seen["honoured"] += 1


def test_fuzzed_requests_on_a_live_engine(llm, truth):
    seen = {"refused": 0, "honoured": 0, "unreached": 0}
    check_refused_or_honoured(llm, truth, seen)
    assert min(seen["refused"], seen["honoured"]) >= 5, seen
    check_honoured(llm, truth, seen)
    assert min(seen.values()) >= 3, seen
    params, wanted = asking("all", LAYERS)
    for out in llm.generate(prompts([5, 30]), params, use_tqdm=False):
        verify(out, wanted, truth)
    assert frontend(llm).engine.refusal is None
