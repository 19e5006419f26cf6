"""The example controllers as users get them: installed beside Weir, named in the settings, run, seen by the doctor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.example_package import run_with_package

CLOSE_OTHERS = True
USE = """
import json
import torch
from vllm import LLM, SamplingParams
import vllm_weir as weir
if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    mood = weir.Probe("mood", torch.randn(256, generator=generator) / 16, 0.0, "resid_post", 2)
    mood.save("mood.safetensors")
    controllers = {"warmth": {"thermostat": {"probe": "mood.safetensors", "layer": 2, "target": 3.0, "gain": 0.5}},
                   "steady": {"steady": {"probe": "own", "target": 3.0, "width": 4.0}}}
    llm = LLM(weir.demo_model(), max_model_len=128, kv_cache_memory_bytes=64 << 20, enforce_eager=True,
              dtype="float32", additional_config={"weir": {"controllers": controllers}})
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    means = [float(llm.generate("Tom went to the garden.", params)[0].scores["mood"].mean()) for _ in range(8)]
    print("means", json.dumps(means))
    weir.remove_controller(llm, "warmth")
    weir.clear_global(llm)
    own = weir.Probe("own", mood.weight, 0.0, "resid_post", 2)
    push = weir.Add(mood.weight.array.reshape(-1), 2, 4.0, positions="generated", when=weir.When("controller:steady"))
    plain = llm.generate("Tom went to the garden.", weir.params(params, probes=own))[0]
    out = llm.generate("Tom went to the garden.", weir.params(params, probes=own, interventions=push))[0]
    print("steady", json.dumps([float(one.scores["own"][-11:].mean()) for one in (plain, out)]), out.receipt.gates)
    from vllm_weir.cli.doctor import examine
    print("doctor", json.dumps(examine(live=False).controllers))
"""


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_example_package(tmp_path: Path) -> None:
    printed = run_with_package("controller_package", USE, tmp_path)
    said = {line.split()[0]: line.split(" ", 1)[1] for line in printed.splitlines() if " " in line}
    means = json.loads(said["means"])
    assert abs(means[-1] - 3.0) < 0.5 * abs(means[0] - 3.0), f"not brought to 3: {means}"
    (plain, steered), gates = json.loads(said["steady"].partition("]")[0] + "]"), said["steady"].partition("]")[2]
    assert abs(steered - 3.0) < abs(plain - 3.0) and "'probe': 'controller:steady', 'fired': 11, 'of': 11" in gates
    found = {row["controller"]: row["problem"] for row in json.loads(said["doctor"])}
    assert found == {"thermostat": "", "steady": ""}
