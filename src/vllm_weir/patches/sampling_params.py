"""Wrapper of the copy that vLLM makes of a request's params.

Imports nothing of vLLM, which may still be importing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_weir.schema.keys import carries_keys
from vllm_weir.schema.request import ATOMS, plain_copy

if TYPE_CHECKING:
    from vllm_weir.patches.registry import PatchStatus


def clone(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``SamplingParams.clone``: vLLM's deep copy of Weir's keys takes longer than their admission."""

    def wrapper(self: Any) -> Any:
        if self.skip_clone or not carries_keys(self.extra_args):
            return original(self)
        cloned = copy.copy(self)
        try:
            for name in self.__struct_fields__:
                value = getattr(self, name)
                if type(value) not in ATOMS:
                    setattr(cloned, name, plain_copy(value))
        except RecursionError:  # they contain themselves, which admission refuses
            return original(self)
        return cloned

    return wrapper
