"""A dozen architectures from model to verdict, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.conformance.representatives import REPRESENTATIVES
from tests.conformance.verdict import CONFORMS, Verdict
from tests.support.machine import needs, op

pytestmark = pytest.mark.conformance
CHANGED_BETWEEN = {("SolarForCausalLM", "resid_pre"): 2}
"""Points that models rightly lack in some blocks, and in how many they have them: Solar mixes an earlier stream
in before two of the test model's four blocks."""


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    """Of all that this run has tests of, from one command: it imports vLLM once."""
    out = tmp_path_factory.mktemp("conformance")
    tests = [item.callspec.params for item in request.session.items if item.fspath == request.fspath]
    wanted = [params["architecture"] for params in tests]
    command = [
        sys.executable,
        "-m",
        "tests.conformance",
        *wanted,
        "--out",
        str(out),
        "--results",
        str(out / "all.json"),
    ]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=False)
    return {a: Verdict.load(out / f"{a}.json") for a in wanted if (out / f"{a}.json").exists()}


KERNELS = dict.fromkeys(("DeepseekV3ForCausalLM", "DeepseekV3ForCausalLM:compiled"), needs(op("mla_decode_kvcache")))
"""Operations that vLLM has no other code for."""


FAST = ("LlamaForCausalLM", "Gemma3ForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM")


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(a, marks=() if a in FAST else [pytest.mark.thorough, *([KERNELS[a]] if a in KERNELS else [])])
        for a in REPRESENTATIVES
    ],
)
def test_conforms(architecture: str, verdicts: dict[str, Verdict]) -> None:
    assert architecture in verdicts, "no verdict was written: it ran out of time or crashed"
    verdict = verdicts[architecture]
    assert verdict.verdict == CONFORMS, verdict.reason
    assert verdict.lens["error"] is not None, verdict.lens["refused"]
    for hook in ("resid_pre", "resid_post"):
        found = verdict.hooks[hook]
        assert found["of"] > 0
        if (architecture, hook) in CHANGED_BETWEEN:
            assert found["layers"] == CHANGED_BETWEEN[architecture, hook]
            assert "the model changes the stream" in found["refused"]
        else:
            assert found["layers"] == found["of"]
