"""What goes wrong at the start is said at the start, and nothing is silently off."""

from __future__ import annotations

import pytest

import vllm_weir as weir
from tests.engine.common import directory, oracle, prompts, sampling, verify
from tests.support.engines import get_llm

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("own", "field"),
    [
        ({"hooks": ["nonsense"]}, "settings.hooks"),
        ({"layers": [-1]}, "settings.layers"),
        ({"buffer_bytes": 1}, "settings.buffer_bytes"),
        ({"bufer_bytes": 1 << 20}, "settings.bufer_bytes"),
        (7, "additional_config.weir"),
    ],
)
def test_bad_settings_stop_the_start(root, own, field):
    with pytest.raises(weir.WeirError) as e:
        get_llm(directory(root), additional_config={"weir": own})
    assert e.value.field == field


def test_an_untapped_block_is_refused_at_request_time(root):
    llm = get_llm(directory(root), additional_config={"weir": {"layers": [1]}})
    truth = oracle(directory(root))
    with pytest.raises(weir.WeirError, match="not tapped") as e:
        llm.generate(prompts([4]), weir.params(sampling(), capture=weir.Capture(layers=2)), use_tqdm=False)
    assert e.value.field == "capture[0].layers"
    with pytest.raises(weir.WeirError):
        llm.generate(prompts([4]), weir.params(sampling(), capture=weir.Capture()), use_tqdm=False)
    # What leaves a block is what enters the next.
    capture = [weir.Capture(layers=[0, 1]), weir.Capture("resid_pre", 2)]
    (out,) = llm.generate(prompts([9]), weir.params(sampling(), capture=capture), use_tqdm=False)
    verify(out, {("resid_post", 0): ["all"], ("resid_post", 1): ["all"], ("resid_pre", 2): ["all"]}, truth)


def test_a_block_that_does_not_exist_is_the_reason_of_every_refusal(root):
    llm = get_llm(directory(root), additional_config={"weir": {"layers": [4]}})
    with pytest.raises(weir.WeirError, match=r"blocks 0\.\.3") as e:
        llm.generate(prompts([4]), weir.params(sampling(), capture=weir.Capture()), use_tqdm=False)
    assert e.value.field
    (out,) = llm.generate(prompts([4]), sampling(), use_tqdm=False)
    assert out.activations is None and len(out.outputs[0].token_ids) == 8


def test_a_missing_guard_stops_the_plugin(monkeypatch):
    """Without the guard requests with keys would run unheeded."""
    from vllm.v1.engine.output_processor import OutputProcessor

    from vllm_weir.patches.registry import install

    monkeypatch.delattr(OutputProcessor, "add_request")
    with pytest.raises(RuntimeError, match=r"OutputProcessor\.add_request"):
        install(active=False)
