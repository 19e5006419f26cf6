"""Estimates are TransformerLens's: those of a recorded run of it, and, where it is installed, of runs made now.

`transformer_lens.json` is made by `scripts/attribution_reference.py`. It is recorded because TransformerLens asks for
versions that vLLM's releases do not go with.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.machine import module, needs
from tests.support.models import make_model
from vllm_weir.experiments.attribute.run import attribute
from vllm_weir.experiments.metrics import logit_diff

ROOT = Path(__file__).resolve().parents[4]
RECORDED = Path(__file__).with_name("transformer_lens.json")
DEMO = ROOT / "src" / "vllm_weir" / "demo" / "model"
BY_HEAD = ("q", "k", "v", "z")
BOUND = 1e-4


def compare(model, reference):
    asked = dict(metric=logit_diff(reference["a"], reference["b"]), top_k=0)
    clean, corrupt, estimates = reference["clean"], reference["corrupt"], reference["estimates"]
    assert len(estimates) == 10
    for hook, expected in estimates.items():
        found = attribute(model, clean, corrupt, hooks=hook, heads="all" if hook in BY_HEAD else None, **asked)
        expected = np.array(expected)
        assert found.grid[0].shape == expected.shape
        scale = np.abs(expected).max()
        assert scale > 1e-3 and np.abs(found.grid[0] - expected).max() <= BOUND * scale, hook
        for run, value in reference["metric"].items():
            assert abs(found.baseline._asdict()[run] - value) <= BOUND * abs(value)


def test_the_recorded_run_of_the_shipped_model():
    reference = json.loads(RECORDED.read_text())
    assert reference["versions"]["transformer_lens"] == "4.3.0"
    digest = hashlib.sha256((DEMO / "model.safetensors").read_bytes()).hexdigest()
    assert digest == reference["weights_sha256"], "the model has changed: run scripts/attribution_reference.py"
    compare(str(DEMO), reference)


@needs(module("transformer_lens"))
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "qwen3"])
def test_a_run_made_now(family, tmp_path):
    model, out = make_model(family, "a", tmp_path), tmp_path / "reference.json"
    clean, corrupt = [5, 9, 200, 31, 77, 140, 6, 6, 310, 12, 45], [5, 9, 201, 31, 77, 99, 6, 6, 310, 12, 45]
    pair = json.dumps([clean, corrupt, [17, 33]])
    script = ROOT / "scripts" / "attribution_reference.py"
    subprocess.run([sys.executable, str(script), str(model), "--out", str(out), "--pair", pair], check=True)
    compare(str(model), json.loads(out.read_text()))
