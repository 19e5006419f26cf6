"""Triton's kernels in its interpreter, within the test's process; elsewhere in it they are what they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import triton.experimental.gluon  # noqa: F401 - has to see the kernels as they are
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

MASKED = {"create_masked_store": 3, "create_masked_load": 2}
"""The interpreter's functions that take a mask, and where."""


class Interpreted(interpreter.InterpretedFunction):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Go on in the launch that calls this function: `_patch_lang` again would take most of the time."""
        return self.rewrite()(*args, **kwargs)


@contextlib.contextmanager
def interpreted(*modules: ModuleType) -> Iterator[None]:
    """Within, the kernels of these modules are interpreted."""
    places = (tl, tl.core, tl.math, tl.standard, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)
    before = [dict(vars(place)) for place in places]
    patch_language = interpreter._patch_lang
    with pytest.MonkeyPatch.context() as patch:
        for name, at in MASKED.items():
            patch.setattr(interpreter.InterpreterBuilder, name, _with_mask_of_bools(name, at))
        for module in (tl, tl.standard, *modules):
            for name, kernel in list(vars(module).items()):
                if isinstance(kernel, JITFunction):
                    patch.setattr(module, name, Interpreted(kernel.fn))
        patch_language(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        patch.setattr(interpreter, "_patch_lang", lambda fn: SimpleNamespace(restore=lambda: None))
        yield
    for place, was in zip(places, before, strict=True):
        for name, value in list(vars(place).items()):
            if name not in was and isinstance(place, type):
                delattr(place, name)
            elif name in was and was[name] is not value:
                setattr(place, name, was[name])


def _with_mask_of_bools(name: str, at: int) -> Any:
    """`mask & scalar` is int32 to the interpreter, and then refused."""
    whole = getattr(interpreter.InterpreterBuilder, name)

    def masked(*args: Any, **kwargs: Any) -> Any:
        args[at].data = args[at].data.astype(bool)
        return whole(*args, **kwargs)

    return masked


def compile_for_hopper(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any) -> bytes:
    """Return the code for compute capability 9.0; arguments of no type here are int32."""
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    return compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
