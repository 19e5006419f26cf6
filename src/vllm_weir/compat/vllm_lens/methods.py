"""vllm-lens's methods of ``LLM``: hooks that act on every request.

They are there before anything else of Weir is loaded, so that a part that cannot be loaded fails their calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def register_hooks(self: Any, hooks: Sequence[Any], prefetch_params: Sequence[str] | None = None) -> None:
    """Let hooks act on every later request, after those that are registered.

    Args:
        self: the LLM.
        hooks: `LensHook`, or vllm-lens's own.
        prefetch_params: has no effect: a function reads weights without.

    Raises:
        WeirError: naming the field, if the engine cannot do them; then nothing changes.
    """
    from vllm_weir.compat.vllm_lens.request import REGISTERED, in_lens_words, lens_hooks

    names = _frontend(self).names
    added = lens_hooks(hooks, REGISTERED, len(names.global_hooks))
    with in_lens_words():
        names.set_global_hooks((*names.global_hooks, *added))


def collect_hook_results(self: Any) -> dict[str, dict[str, dict[Any, Any]]]:
    """Return what registered hooks have saved: request id -> index of the hook, as text -> name -> value.

    It is kept until `clear_hooks`.
    """
    from vllm_weir.compat.vllm_lens.request import REGISTERED, hook_results

    found = {name: hook_results(told.saved(), REGISTERED) for name, told in _frontend(self).global_told.items()}
    return {name: results for name, results in found.items() if results}


def clear_hooks(self: Any) -> None:
    """Forget the registered hooks, and what they have saved."""
    frontend = _frontend(self)
    frontend.names.set_global_hooks(())
    frontend.global_told.clear()


def prefetch_params(self: Any, names: Sequence[str]) -> None:
    """Do nothing: a function reads weights without."""


def clear_prefetched(self: Any) -> None:
    """Do nothing, as `prefetch_params`."""


METHODS = (register_hooks, collect_hook_results, clear_hooks, prefetch_params, clear_prefetched)


def _frontend(llm: Any) -> Any:
    from vllm_weir.frontend.lookup import frontend_of

    return frontend_of(llm)
