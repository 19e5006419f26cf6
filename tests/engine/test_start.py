"""What goes wrong at the start is said at the start, and nothing is silently off."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import vllm_weir as weir
from tests.engine.common import directory, oracle, prompts, sampling, verify
from tests.support.engines import get_llm
from tests.support.zygote import ROOT, zygote

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


def child(model_dir: Path, folder: Path, mode: str, **env: str) -> dict:
    env = {k: v for k, v in os.environ.items() if not k.startswith("WEIR_")} | env
    done = zygote().run(["-m", "tests.engine.start_child", str(model_dir), mode], env, ROOT, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [text for text in done.stdout.splitlines() if text.startswith("FOUND ")]
    return json.loads(line[6:])


@pytest.mark.parametrize(
    ("mode", "env", "why"),
    [("plain", {"WEIR_DISABLE": "1"}, "WEIR_DISABLE"), ("no-patch-point", {}, "get_computed_blocks")],
    ids=["switched-off", "patch-point-missing"],
)
def test_when_weir_is_off_its_keys_fail_and_the_rest_goes_on(root, tmp_path, mode, env, why):
    found = child(directory(root), tmp_path, mode, **env)
    truth = oracle(directory(root))
    assert found["tokens"] == [truth.greedy(p["prompt_token_ids"], 4) for p in prompts([5, 9])]
    for key in ("weir", "lens", "steer"):
        field, message = found[key]
        assert field and why in message
    assert found["goes_on"]


def test_a_missing_guard_stops_the_plugin(monkeypatch):
    """Without the guard requests with keys would run unheeded."""
    from vllm.v1.engine.output_processor import OutputProcessor

    from vllm_weir.patches.registry import install

    monkeypatch.delattr(OutputProcessor, "add_request")
    with pytest.raises(RuntimeError, match=r"OutputProcessor\.add_request"):
        install(active=False)
