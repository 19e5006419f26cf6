"""The example packages as users get them: installed beside Weir, named in the settings, run, seen by the doctor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.example_package import run_with_packages
from tests.support.machine import cpu, needs

pytestmark = [
    pytest.mark.engine,
    pytest.mark.thorough,
    pytest.mark.timeout(600),
    needs(cpu("the program takes a whole GPU")),
]
USE = """
import json
import torch
from vllm import LLM, SamplingParams
import vllm_weir as weir
from vllm_weir.cli.doctor import examine
if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    mood = weir.Probe("mood", torch.randn(256, generator=generator) / 16, 0.0, "resid_post", 2)
    mood.save("mood.safetensors")
    settings = {
        "sinks": {"watch": {"norm_watch": {"path": "odd.jsonl", "times": 1.5}}},
        "controllers": {"warmth": {"thermostat": {"probe": "mood.safetensors", "layer": 2, "target": 3.0, "gain": 0.5}},
                        "steady": {"steady": {"probe": "own", "target": 3.0, "width": 4.0}}},
    }
    llm = LLM(weir.demo_model(), max_model_len=128, kv_cache_memory_bytes=64 << 20, enforce_eager=True,
              dtype="float32", additional_config={"weir": settings})
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    outs = [llm.generate("Tom went to the garden.", params)[0] for _ in range(8)]
    weir.remove_controller(llm, "warmth")
    weir.clear_global(llm)
    own = weir.Probe("own", mood.weight, 0.0, "resid_post", 2)
    push = weir.Add(mood.weight.array.reshape(-1), 2, 4.0, positions="generated", when=weir.When("controller:steady"))
    plain = llm.generate("Tom went to the garden.", weir.params(params, probes=own))[0]
    out = llm.generate("Tom went to the garden.", weir.params(params, probes=own, interventions=push))[0]
    found = examine(live=False)
    print(json.dumps({
        "sinks": outs[0].receipt.sinks, "files": outs[0].receipt.files,
        "means": [float(out.scores["mood"].mean()) for out in outs],
        "steady": [float(one.scores["own"][-11:].mean()) for one in (plain, out)], "gate": out.receipt.gates[0],
        "problems": [(list(row.values())[0], row["problem"]) for row in (*found.consumers, *found.controllers)],
    }))
"""


def test_a_consumer_and_controllers(tmp_path: Path) -> None:
    printed = run_with_packages(("consumer_package", "controller_package"), USE, tmp_path)
    said = json.loads(printed.strip().splitlines()[-1])
    assert said["sinks"]["watch"] == "written" and said["files"] == ["odd.jsonl"]
    for line in map(json.loads, (tmp_path / "odd.jsonl").read_text().splitlines()):
        assert line["rows"] > 5 and all(set(odd) == {"site", "position", "norm"} for odd in line["odd"])
    means, (plain, steered), gate = said["means"], said["steady"], said["gate"]
    assert abs(means[-1] - 3.0) < 0.5 * abs(means[0] - 3.0), f"not brought to 3: {means}"
    assert abs(steered - 3.0) < abs(plain - 3.0)
    assert (gate["probe"], gate["fired"], gate["of"]) == ("controller:steady", 11, 11)
    problems = dict(said["problems"])
    assert [problems[name] for name in ("norm_watch", "thermostat", "steady")] == ["", "", ""]
