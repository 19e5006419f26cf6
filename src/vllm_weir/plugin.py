"""The ``vllm.general_plugins`` entry point. vLLM calls `register` in every process it starts."""

from __future__ import annotations


def register() -> None:
    """Hold vLLM's seams. Raises if not even the guard can be held: loud beats silently off."""
    from vllm_weir.orphans import end_with_parent
    from vllm_weir.seams.table import install
    from vllm_weir.settings import disabled

    end_with_parent()
    install(active=not disabled())
