"""How commands start an engine."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.util.parent_death import children_that_end_with_us
from vllm_weir.util.progress import told
from vllm_weir.util.shipped import check_folder, model_path

MOST = 400
"""Characters that are printed of what another package has raised."""


def start_llm(model: str, options: dict[str, Any]) -> Any:
    """Return an ``LLM`` that logs errors only; its processes are spared Ctrl-C, and end with this one.

    Args:
        model: directory or hub id, or ``demo``.
        options: of ``vllm.LLM``.

    Raises:
        WeirError: naming ``model``, for a directory that does not exist; or ``engine``, if vLLM refuses the model or
            the options.
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
