"""Tests skip what the machine lacks, with the reason, and a run says so at its start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conformance import engine as conformance
from tests.conformance.zoo import ZOO
from tests.support import machine
from tests.support.machine import GIB, MIB
from tests.support.models import MODELS, head_size

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import pytest
from tests.support.machine import needs

no_moon = lambda: "no moon tonight"

@needs(lambda: None, no_moon)
@pytest.mark.parametrize("phase", [1, 2])
def test_tide(phase):
    raise AssertionError

@needs(lambda: None)
def test_beach():
    pass

@pytest.mark.slow
@needs(no_moon)
def test_that_is_not_selected():
    pass
"""
FILE = """
import pytest

pytest.importorskip("nothing_is_called_this")
"""


def run(*arguments: str, cwd: Path = ROOT, path: Path = ROOT, **env: str) -> list[str]:
    """The lines that a run of pytest prints; it has to succeed."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    # Of the plugins that are installed those that a run needs: importing all takes longer than the run.
    environ |= {"PYTHONPATH": f"{path}:{ROOT / 'src'}:{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **env}
    plugins = ["-p", "xdist", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugins, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("workers", [[], pytest.param(["-n", "2"], marks=pytest.mark.thorough)], ids=["alone", "xdist"])
def test_a_run_says_at_its_start_what_it_skips(tmp_path, workers):
    (tmp_path / "test_sea.py").write_text(RUN)
    (tmp_path / "test_air.py").write_text(FILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    needs\n    slow\n")
    lines = run("-p", "tests.conftest", "-m", "not slow", "-rs", *workers, cwd=tmp_path)
    told = [line for line in lines if line.startswith("will skip")]
    assert told == [
        "will skip: test_air.py (could not import 'nothing_is_called_this': No module named 'nothing_is_called_this')",
        "will skip: test_tide (2 cases) (no moon tonight)",
    ]
    first = next(n for n, line in enumerate(lines) if re.search(r"\d%\]", line))
    assert lines.index(told[-1]) < first, "before any test has run"
    assert re.search(r"1 passed, 3 skipped", lines[-1])
    assert any("no moon tonight" in line for line in lines[first:])


@pytest.mark.thorough
def test_a_run_that_skips_nothing_says_nothing(tmp_path):
    (tmp_path / "test_sea.py").write_text("def test_beach():\n    pass\n")
    lines = run("-p", "tests.conftest", "-n", "1", cwd=tmp_path)
    assert not [line for line in lines if "will skip" in line] and "1 passed" in lines[-1]


@pytest.mark.thorough
@machine.needs(machine.module("vllm"), machine.x86)
def test_four_bit_weights_are_skipped_without_avx_512():
    lines = run("tests/engine/test_points.py", "-k", "four_bit", "-q", path=ROOT / "tests/support/processor")
    reason = "vLLM's kernels for this processor (AVX2) have no cpu_gemm_wna16"
    assert f"will skip: test_four_bit_weights ({reason})" in lines and "1 skipped" in lines[-1]


def test_lines_name_few_tests_and_count_many():
    skipped = [(f"a.py::test_{name}[{case}]", "no sea") for name in "wxyz" for case in (1, 2)]
    skipped += [("b.py::test_one", "no sea"), ("b.py::test_two", "no sky"), ("b.py::test_three", "no sky")]
    skipped += [("c.py", "no sky")]
    assert machine.announce(skipped) == [
        "will skip: 8 tests of a.py, test_one (no sea)",
        "will skip: test_two, test_three, c.py (no sky)",
    ]
    assert machine.announce([]) == []


def platform(cpu: bool = True) -> SimpleNamespace:
    """Stands for vLLM's platform."""
    return SimpleNamespace(is_cpu=lambda: cpu, import_kernels=lambda: None, supported_dtypes=[torch.float32])


KERNELS = r"kernels for this processor \(.+\) have no silu"
NEEDS = [
    # what is asked, the machine's answer if not met and if met, the need, its reason
    ("has_op", lambda _: False, lambda _: True, machine.op("silu"), KERNELS),
    ("model_dtypes", lambda: ("float32",), lambda: ("bfloat16",), machine.model_dtype("bfloat16"), "runs no bfloat16"),
    ("head_sizes", lambda: (64, 128), lambda: (32,), machine.attention_heads(32), "no heads of 32 .* only of 64, 128"),
    ("total_memory", lambda: 3 * GIB // 2, lambda: 2 * GIB, machine.memory(2 * GIB), "needs 2 GiB .* has 1.5"),
    ("has_module", lambda _: False, lambda _: True, machine.module("ray"), "ray is not installed"),
    ("has_module", lambda _: False, lambda _: True, machine.object_store, "s3fs is not installed"),
    ("has_module", lambda _: False, lambda _: True, machine.chromium, "playwright is not installed"),
    ("browser", lambda: None, lambda: "/usr/bin/chromium", machine.chromium, "no Chromium|playwright"),
    ("node_program", lambda: None, lambda: "/usr/bin/node", machine.node, "no Node.js"),
    (
        "free_shared_memory", lambda: 64 * MIB, lambda: 240 * MIB, machine.engine_processes,
        "240 MiB in /dev/shm; 64 MiB are free",
    ),
    ("cpp_compiler", lambda: None, lambda: "/usr/bin/g++", machine.inductor, "apt install g"),
    ("refuses_tmpfs", lambda: "mount: permission denied", lambda: None, machine.tmpfs, "permission denied"),
    ("lens_folder", lambda: "", lambda: "/lens", machine.lens_source, "VLLM_LENS_SOURCE"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "unmet", "met", "need", "reason"), NEEDS)
def test_needs_that_are_not_met_say_why(monkeypatch, asked, unmet, met, need, reason):
    monkeypatch.setattr(machine, "_platform", platform)
    for other, _, good, *_ in NEEDS:
        monkeypatch.setattr(machine, other, good)
    assert need() is None
    monkeypatch.setattr(machine, asked, unmet)
    assert re.search(reason, need())


def test_a_gpu_needs_no_kernels_for_processors(monkeypatch):
    monkeypatch.setattr(machine, "_platform", lambda: platform(cpu=False))
    monkeypatch.setattr(machine, "free_shared_memory", lambda: 0)
    for name, value in (("has_op", lambda _: False), ("head_sizes", lambda: ())):
        monkeypatch.setattr(machine, name, value)
    assert [need() for need in (machine.op("silu"), machine.attention_heads(8), machine.engine_processes)] == [None] * 3


def test_ranks_get_cores_that_the_process_may_use(monkeypatch):
    for have, bound in (((4, 6, 7), "4|6"), ((5,), "5|5")):
        monkeypatch.setattr(machine, "cores", lambda have=have: have)
        assert machine.binding(2) == bound


@machine.needs(machine.module("vllm"))
def test_predicates_ask_the_machine():
    """What they find here is what can be seen by other means."""
    assert set(machine.cores()) == os.sched_getaffinity(0)
    assert 0 < machine.total_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine.has_module("torch") and not machine.has_module("nothing_is_called_this")
    assert not machine.has_op("nothing_is_called_this") and "float32" in machine.model_dtypes()
    flags = Path("/proc/cpuinfo").read_text()
    if machine.on_cpu():
        assert machine.has_op("rms_norm") and 64 in machine.head_sizes()
    if machine.platform.machine() == "x86_64" and "WEIR_TEST_PROCESSOR" not in os.environ:
        assert ("avx512f" in flags) == machine.instruction_set().startswith("AVX-512")
        assert ("amx_tile" in flags) == machine.has_amx()


@machine.needs(machine.module("vllm"))
def test_the_tiny_models_have_heads_that_vllm_takes():
    sizes = {head_size(*model) for model in MODELS}
    assert sizes <= set(machine.head_sizes()) and len(sizes) > 1


def test_latent_attention_in_float32_does_without_amx(monkeypatch):
    """Its kernels take bfloat16 only, and vLLM prefers them unasked."""
    latent, other = ZOO["DeepseekV3ForCausalLM"], ZOO["LlamaForCausalLM"]
    monkeypatch.setattr(conformance, "has_amx", lambda: True)
    assert conformance.on_cpu(latent) == {"attention_config": {"backend": "CPU_MLA"}}
    assert conformance.on_cpu(other) == {}
    monkeypatch.setattr(conformance, "has_amx", lambda: False)
    assert conformance.on_cpu(latent) == {}


def test_tests_are_skipped_by_what_they_need_alone():
    """Or the start of a run could not say it."""
    other = re.compile(r"pytest\.skip\(|mark\.skip|\bskipif\b|^[ ].*importorskip\(", re.MULTILINE)
    fetched = ROOT / "tests/other_systems.py"  # whether a source can be had is known when it is fetched
    allowed = {Path(__file__), ROOT / "tests/conftest.py", fetched}
    found = [path for path in (ROOT / "tests").rglob("*.py") if path not in allowed and other.search(path.read_text())]
    assert found == []
