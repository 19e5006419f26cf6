"""The ``vllm.general_plugins`` entry point. vLLM calls `register` in every process it starts.

vLLM logs and ignores a plugin that cannot be imported, so this imports with the standard library alone.
"""

from __future__ import annotations

from vllm_weir.guard import refuse


def register() -> None:
    """Patch vLLM; what keeps Weir from working becomes the refusal of every request with its keys.

    Raises:
        RuntimeError: if not even the guard that refuses can be held. The engine does not start then.
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
        from vllm_weir.util.parent_death import end_with_parent

        end_with_parent()
        install(active=not disabled())
    except refuse.Unguarded:
        raise
    except Exception as e:  # noqa: BLE001 - whatever it is: the guard tells those whom it concerns
        refuse.refuse_because_of(e)
