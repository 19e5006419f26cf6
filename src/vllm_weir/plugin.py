"""The ``vllm.general_plugins`` entry point. vLLM calls `register` in every process it starts.

vLLM logs and ignores a plugin that cannot be imported, so this imports with the standard library
alone.
"""

from __future__ import annotations

from vllm_weir.guard import refuse


def register() -> None:
    """Patch vLLM in this process.

    If Weir cannot work here, every request with its keys is refused with the cause.

    Raises:
        RuntimeError: if not even the guard that refuses them can be installed; the engine does not
            start then.
    """
    try:
        _install()
    except refuse.Unguarded:
        refuse.retry_next_time()
        raise


def _install() -> None:
    try:
        from vllm_weir.config.env import disabled
        from vllm_weir.patches.registry import install
        from vllm_weir.util.start_llm import end_with_parent

        end_with_parent()
        install(active=not disabled())
    except refuse.Unguarded:
        raise
    except Exception as e:  # noqa: BLE001 - whatever it is becomes the refusal of requests with Weir's keys
        refuse.refuse_because_of(e)
