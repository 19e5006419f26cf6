"""Look-ups of what Weir keeps beside an engine: its frontend, and the views of outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_weir.errors import WeirError
from vllm_weir.frontend.engine_frontend import EngineFrontend
from vllm_weir.guard.outputs import VIEW as _VIEW
from vllm_weir.guard.refuse import refusal_here

if TYPE_CHECKING:
    from vllm_weir.frontend.outputs.view import OutputView

FRONTEND, TRACKER = "_weir_frontend", "_weir_tracker"


def view_of(completion: Any) -> OutputView | None:
    return getattr(completion, _VIEW, None)


def parts_of(output: Any) -> Sequence[Any]:
    """Return what a request's output has of each sequence; a pooling request's has one part."""
    return output.outputs if isinstance(output.outputs, list) else (output.outputs,)


def engine_of(llm: Any) -> Any:
    """Return the ``LLMEngine`` or ``AsyncLLM`` of an ``LLM`` or Weir's drop-in, or what is given."""
    engine = llm
    for attribute in ("llm_engine", "engine"):
        engine = getattr(engine, attribute, engine)
    return engine


def frontend_of(llm: Any) -> EngineFrontend:
    """Return the frontend of an ``LLM``, ``LLMEngine``, ``AsyncLLM`` or Weir's drop-in.

    Raise WeirError if it has none.
    """
    frontend = _attached(engine_of(llm))
    if frontend is None:
        why = refusal_here()
        raise WeirError(
            f"{type(llm).__name__} is no engine that Weir serves{f': {why}' if why else '; see `weir doctor`'}", "llm"
        )
    return frontend


def _attached(engine: Any) -> EngineFrontend | None:
    return getattr(getattr(engine, "output_processor", None), FRONTEND, None)


def has_frontend(engine: Any) -> bool:
    return _attached(engine) is not None


async def ask_workers(engine: Any) -> None:
    """Ask an ``AsyncLLM``'s workers what they serve, unless they have reported or failed."""
    engine = getattr(engine, "engine", engine)
    frontend = _attached(engine)
    if frontend is not None and frontend.engine.capabilities is None and frontend.engine.refusal is None:
        try:
            frontend.learn(await engine.collective_rpc("weir_report"))
        except Exception as e:  # noqa: BLE001 - whatever a worker raises becomes the refusal
            frontend.engine.refusal = unreported(e)


def unreported(e: Exception) -> str:
    return (
        f"the workers did not report ({type(e).__name__}: {e}): is vllm-weir installed where they run, and with it "
        "everything that it needs? Their log says what could not be loaded"
    )
