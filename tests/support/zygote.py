"""Scripts run by forks of a process that has imported vLLM: the import is most of what a short script takes.

What a script sees is what it would see on its own: its arguments, directory, environment and output, and its end.
Environment variables that vLLM reads while it is imported have to be there when the zygote starts.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Done(NamedTuple):
    """What a script did."""

    returncode: int
    stdout: str
    stderr: str


class Zygote:
    """One script at a time.

    Args:
        env: the environment that it, and every script, starts with.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.zygote"], cwd=ROOT, env=dict(env),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, argv: Sequence[str], cwd: Path, folder: Path) -> Done:
        """Run ``argv[0]`` as a script in `cwd`; its output passes through files in `folder`."""
        out, err = folder / "zygote.out", folder / "zygote.err"
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        print(json.dumps([list(argv), str(cwd), str(out), str(err)]), file=stdin, flush=True)
        said = stdout.readline()
        assert said, "the process that forks has died"
        return Done(json.loads(said), out.read_text(), err.read_text())

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    import vllm.model_executor.models.llama
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM  # noqa: F401

    import vllm_weir  # noqa: F401

    for line in sys.stdin:
        argv, cwd, out, err = json.loads(line)
        child = os.fork()
        if not child:
            _become(argv, cwd, out, err)
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), file=answers, flush=True)


def _become(argv: list[str], cwd: str, out: str, err: str) -> None:
    for path, number in ((os.devnull, 0), (out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    os.chdir(cwd)
    sys.argv[:] = argv
    sys.path[0] = str(Path(argv[0]).parent)
    runpy.run_path(argv[0], run_name="__main__")
    sys.exit(0)


if __name__ == "__main__":
    _serve()
