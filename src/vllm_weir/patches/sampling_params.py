"""Patch of the copy that vLLM makes of a request's params. Imports nothing of vLLM, whose imports may be under way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_weir.schema.keys import carries_keys
from vllm_weir.schema.request import ATOMS, plain_copy

if TYPE_CHECKING:
    from vllm_weir.patches.registry import PatchStatus


def clone(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """vLLM's general deep copy takes longer than all of Weir's admission; for requests with Weir's keys a quick one."""

    def wrapper(self: Any) -> Any:
        if self.skip_clone or not carries_keys(self.extra_args):
            return original(self)
        out = copy.copy(self)
        try:
            for name in self.__struct_fields__:
                value = getattr(self, name)
                if type(value) not in ATOMS:
                    setattr(out, name, plain_copy(value))
        except RecursionError:  # it holds itself: admission says what is wrong with it
            return original(self)
        return out

    return wrapper
