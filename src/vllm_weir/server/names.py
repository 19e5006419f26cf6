"""The names of a server: how they are spelled, and what its operator gives names to in its options."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

from vllm_weir.errors import WeirError, brief
from vllm_weir.frontend.admission.vector_registry import RegistryContents
from vllm_weir.schema.named_hooks import Use
from vllm_weir.server.limits import ServerLimits
from vllm_weir.server.state import ServerState

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)


def check_name(name: str, field: str = "name") -> None:
    if not NAME.fullmatch(name) or _DIGEST.fullmatch(name):
        raise WeirError(
            "a name has 1 to 128 letters, digits and . _ : @ + -, begins with a letter or digit, and is not a digest",
            field,
        )


class NamedOption:
    """An option of ``weir serve`` that names something and is given once for each; all processes of the server read it.

    `variable`: of the environment, in which the names and what they stand for travel as JSON; `any_name`: whether names
    that `check_name` refuses are taken, too.
    """

    def __init__(self, option: str, variable: str, any_name: bool = False) -> None:
        self.option, self.variable, self._any_name = option, variable, any_name

    def put(
        self, values: Sequence[str], parse: Callable[[str], tuple[str, Any]], environ: MutableMapping[str, str]
    ) -> None:
        """Put the option's values into the environment; `parse` splits one into a name and JSON data.

        Raise WeirError naming the option, if a name is wrong, or is given twice.
        """
        found: dict[str, Any] = {}
        for value in values:
            name, named = parse(value)
            if name in found:
                raise WeirError(f"{brief(name)!r} is given twice", self.option)
            if not self._any_name:
                check_name(name, self.option)
            found[name] = named
        if found:
            environ[self.variable] = json.dumps(found)

    def given(self, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
        return dict(json.loads(environ.get(self.variable) or "{}"))

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """Let errors about what has this name begin with it, and name the option."""
        try:
            yield
        except (WeirError, OSError) as e:
            raise WeirError(f"{brief(name)}: {e}", self.option) from None

    async def load(
        self,
        state: ServerState,
        load: Callable[[str, Any], Awaitable[Any]],
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Load what the environment has, one after the other, in this process.

        Raise WeirError naming the option, if the engine cannot serve one.
        """
        given = self.given(environ)
        if given:
            await state.capabilities()
        for name, named in given.items():
            with self.at(name):
                await load(name, named)


def check_room(contents: RegistryContents, limits: ServerLimits) -> None:
    """Raise WeirError if the contents exceed the server's limits."""
    names = len(contents.vectors) + len(contents.modules) + len(contents.probes)
    if names > limits.vectors:
        raise WeirError(f"{limits.vectors} names are in use, the limit (WEIR_SERVE_VECTORS); delete some", "name")
    arrays = {
        v.digest: v.array.nbytes
        for n in contents.vectors.values()
        for v in n.directions.values()
        if v.array is not None
    }
    for k, one in enumerate((*(i for module in contents.modules.values() for i in module), *contents.always)):
        if isinstance(one, Use):
            arrays[f"hook {k}"] = one.nbytes
        arrays |= {v.digest: v.array.nbytes for v in one.given if v.array is not None}
    for registered in contents.probes.values():
        arrays |= {v.digest: v.array.nbytes for v in registered.probe.given if v.array is not None}
    if sum(arrays.values()) > limits.vector_bytes:
        raise WeirError(
            f"{sum(arrays.values())} bytes of vectors are more than the server keeps ({limits.vector_bytes}, "
            "WEIR_SERVE_VECTOR_BYTES); delete some",
            "name",
        )
