"""Programs run by forks of a process that has imported vLLM: the import is most of what a short one takes.

What a program sees is what it would see on its own: its arguments, directory, environment and output, and its end.
The processes that vLLM starts in it are forked too: as vLLM does by default, but on CPU it has them import everything
again. Environment variables that vLLM reads while it is imported have no effect here, and what its modules would
compile of their own (not the model) is not compiled: a minute's work for each engine that counts logprobs.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Child:
    """A program that runs or has run; as a `subprocess.Popen` of a session of its own, without pipes."""

    def __init__(self, zygote: Zygote, pid: int, argv: Sequence[str]) -> None:
        self.pid, self.args, self.returncode = pid, list(argv), None
        self._zygote = zygote

    def poll(self) -> int | None:
        """How it ended; None while it runs."""
        if self.returncode is None:
            self.returncode = self._zygote.ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float = 600.0) -> int:
        """How it ended, at the latest after `timeout` seconds.

        Raises:
            subprocess.TimeoutExpired: if it has not.
        """
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        """To the program, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Zygote:
    """The process that has imported vLLM."""

    def __init__(self) -> None:
        env = os.environ | {"VLLM_LOGGING_LEVEL": "WARNING", "TORCHDYNAMO_DISABLE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.zygote"], cwd=ROOT, env=env,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._lock = threading.Lock()

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, out: Path, err: Path | None = None
    ) -> Child:
        """Start a program.

        Args:
            argv: as for Python: a script and its arguments, or ``-m``, a module and its arguments.
            env: its whole environment.
            out, err: files for what it says; without `err` both go to `out`.
        """
        out.write_bytes(b"")  # there for whoever reads it before the program has begun
        files = [str(cwd), str(out), str(err) if err else None]
        return Child(self, self.ask("start", list(argv), dict(env), *files), argv)

    def run(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, folder: Path, timeout: float = 600.0) -> Any:
        """Run a program to its end, as `subprocess.run` with its output captured; that passes through `folder`."""
        out, err = folder / "zygote.out", folder / "zygote.err"
        child = self.start(argv, env, cwd, out, err)
        try:
            code = child.wait(timeout)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(argv, code, out.read_text(), err.read_text())

    def ask(self, *question: Any) -> Any:
        """What the process answers."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with self._lock:
            print(json.dumps(question), file=stdin, flush=True)
            said = stdout.readline()
        assert said, "the process that forks has died"
        return json.loads(said)

    def close(self) -> None:
        """End it, and what it has started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@cache
def zygote() -> Zygote:
    """The one of this process, which ends with it."""
    made = Zygote()
    atexit.register(made.close)
    return made


def fork_instead_of_spawn() -> None:
    """From now on, in this process and its children, what is to be spawned is forked."""
    from multiprocessing import context, popen_fork

    context.SpawnProcess._Popen = staticmethod(popen_fork.Popen)  # type: ignore[assignment]
    os.register_at_fork(after_in_child=_as_if_imported)


def _as_if_imported() -> None:
    """What a spawned process would have, and a fork has not."""
    import prometheus_client.values as values

    signal.set_wakeup_fd(-1)  # a loop's descriptor: the child's signals would come to the parent
    values.ValueClass = values.get_value_class()  # chosen by the environment when it is imported


def keep_frozen() -> None:
    """In this process and its children, what is frozen stays so.

    vLLM unfreezes all as an engine ends, and collects: in a fork that also copies whatever was imported before.
    """
    gc.unfreeze = lambda: None


def forking() -> dict[str, str]:
    """The environment in which a program does so from its start, whatever it starts itself."""
    before = filter(None, [os.environ.get("PYTHONPATH")])  # first: a `sitecustomize` there is to be found
    return {"PYTHONPATH": os.pathsep.join([*before, str(ROOT / "tests/support/forking"), str(ROOT)])}


@cache
def replace_kernels_once() -> None:
    """Have vLLM replace kernels that CPUs lack for the first engine of this process alone.

    It looks through all that has been imported, and for the next engine it would replace what it has put there itself.
    """
    from vllm.platforms.cpu import CpuPlatform

    if hasattr(CpuPlatform, "register_triton_kernel_overrides"):
        once = cache(CpuPlatform.register_triton_kernel_overrides)
        CpuPlatform.register_triton_kernel_overrides = staticmethod(once)


@cache
def inspect_models_here() -> None:
    """On CPU, have vLLM look at a model's class in the process that asks, and not in one that imports all of it again.

    It does so for every class that its cache on disk does not know, half a minute each.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        registry._run_in_subprocess = lambda look: look()


@cache
def import_vllm() -> None:
    """What engines and servers import, without any plugin; no collection of garbage looks at it later."""
    import uvicorn  # noqa: F401
    import vllm.entrypoints.openai.api_server
    import vllm.model_executor.models.llama
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.llm_engine
    import vllm.v1.executor.multiproc_executor
    from vllm import LLM  # noqa: F401
    from vllm.platforms import current_platform

    import vllm_weir  # noqa: F401

    if current_platform.is_cpu():  # elsewhere it would put its placeholders for CUDA's events in their place
        import vllm.v1.worker.cpu_worker  # noqa: F401

    replace_kernels()
    inspect_models_here()
    gc.collect()
    gc.freeze()


def replace_kernels() -> None:
    """Before forks are made: none of them has to look for kernels then."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and hasattr(current_platform, "register_triton_kernel_overrides"):
        replace_kernels_once()
        current_platform.register_triton_kernel_overrides()


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.set_inheritable(answers.fileno(), False)
    os.dup2(2, 1)  # what imports print is no answer
    import_vllm()
    alive: set[int] = set()
    for line in sys.stdin:
        what, *more = json.loads(line)
        if what == "start":
            answer: int | None = os.fork()
            if not answer:
                answers.close()
                _become(*more)
            alive.add(answer)
        else:
            (pid,) = more
            found, status = os.waitpid(pid, os.WNOHANG)
            alive -= {found}
            answer = os.waitstatus_to_exitcode(status) if found else None
        print(json.dumps(answer), file=answers, flush=True)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os._exit(0)


def _become(argv: list[str], env: dict[str, str], cwd: str, out: str, err: str | None) -> None:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if err else 1, 2)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    fork_instead_of_spawn()
    keep_frozen()
    _as_if_imported()
    if argv[0] == "-m":
        sys.argv[:], sys.path[0] = argv[1:], cwd
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:], sys.path[0] = argv, str(Path(argv[0]).parent)
        runpy.run_path(argv[0], run_name="__main__")
    sys.exit(0)


if __name__ == "__main__":
    _serve()
