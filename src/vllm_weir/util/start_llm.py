"""How commands start an engine, say on stderr that they are at work, and take its processes with them.

When a command is killed it cannot end the engine's processes itself; vLLM's own would go on and hold the memory that
the next run needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.util.shipped import check_folder, model_path

MOST = 400
"""Characters that are printed of what another package has raised."""
VARIABLE = "WEIR_END_WITH_PARENT"
"""Set in the environment of the processes that end with their parent."""
_PR_SET_PDEATHSIG = 1
EVERY = 30.0
"""Seconds between two lines that say what is being done."""


def start_llm(model: str, options: dict[str, Any]) -> Any:
    """Return an ``LLM`` that logs errors only; its processes are spared Ctrl-C, and end with this one.

    `model`: directory or hub id, or ``demo``; `options`: of ``vllm.LLM``. Raises WeirError, naming ``model``, for a
    directory that does not exist; or ``engine``, if vLLM refuses the model or the options.
    """
    check_folder(model)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM

    try:
        with told(lambda: "starting the engine"), children_without_sigint(), children_that_end_with_us():
            return LLM(model=model_path(model), **{"disable_log_stats": True} | options)
    except WeirError:
        raise
    except (TypeError, ValueError, OSError) as e:
        raise WeirError(f"vLLM cannot start: {reason(e)}", "engine") from None


def reason(e: Exception) -> str:
    """Return one line of what vLLM or transformers raised: of several the first that says why."""
    errors = getattr(e, "errors", None)
    text = str(errors()[0]["msg"]) if callable(errors) else str(e)  # pydantic's
    return " ".join(text.split())[:MOST]


@contextlib.contextmanager
def children_without_sigint() -> Iterator[None]:
    """Block SIGINT in processes that are started inside: a terminal sends Ctrl-C to all of them.

    Child processes inherit the mask of this thread. Another thread, without the mask, receives the
    signal meanwhile, so that Ctrl-C keeps working here.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # starting it later would unblock the signal
    done = threading.Event()
    receiver = threading.Thread(target=done.wait, name="weir-sigint", daemon=True)
    receiver.start()
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        done.set()


@contextlib.contextmanager
def told(state: Callable[[], str]) -> Iterator[None]:
    """Print what is being done on stderr every half minute, unless that is a terminal."""
    if sys.stderr.isatty():
        yield
        return
    done = threading.Event()

    def tell() -> None:
        while not done.wait(EVERY):
            print(state(), file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, name="weir-progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


@contextlib.contextmanager
def children_that_end_with_us() -> Iterator[None]:
    """Let engines that are started inside the block end with this process.

    Has no effect outside the main thread: Linux ends a child with the *thread* that started it, and only the main
    thread lives as long as the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if previous is not None:
            os.environ[VARIABLE] = previous


def end_with_parent() -> None:
    """Let this process end with its parent, if it belongs to an engine started in `children_that_end_with_us`."""
    if VARIABLE in os.environ and multiprocessing.parent_process() is not None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
