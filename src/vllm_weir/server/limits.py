"""Limits of what clients may ask of a server: the ``WEIR_SERVE_*`` environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_weir.config.env import warn_of_unknown
from vllm_weir.errors import WeirError

PREFIX = "WEIR_SERVE_"
ADMIN_KEY = "WEIR_ADMIN_KEY"
SAES = "WEIR_SERVE_SAES"
"""Which sparse autoencoders the server loads; `weir serve` sets it."""
MODULES = "WEIR_SERVE_MODULES"
"""Which modules the server registers when it starts; `weir serve` sets it."""
HOOKS = "WEIR_SERVE_HOOKS"
"""Which functions the server imports; `weir serve` sets it."""
LENSES = "WEIR_SERVE_LENSES"
"""Which lenses the server names; `weir serve` sets it."""
WARM = "WEIR_SERVE_WARM"
"""Whether the server is warmed when it starts; see `ServerLimits.warm`."""
DEFAULT_CAPTURE = "WEIR_SERVE_DEFAULT_CAPTURE"
"""What the server captures of plain requests, and where their files go; `weir serve` sets it."""
STORE = "WEIR_SERVE_STORE"
"""Where the server has what it shares with others; see `ServerLimits.store`."""
DEMO = "WEIR_SERVE_DEMO"
"""Set if the server keeps what comes with the shipped model; `weir serve demo` sets it."""


class ServerLimits(BaseModel):
    """The limits of one server; each is ``WEIR_SERVE_<NAME>``.

    Attributes:
        body_bytes: The largest request body. A larger one is answered with 413 before it is read
            whole.
        inline_default: Bytes of rows that a choice carries inline if the request does not say.
        inline_bytes: The largest inline size that a request may ask for. If Weir's routes are off,
            the most bytes of rows that a choice can carry.
        lens_bytes: The most bytes of rows (before compression) that a response to vllm-lens's keys has
            inline.
        spool_bytes: Bytes of results that are kept to be fetched; the oldest are removed first.
        spool_seconds: Seconds for which a result is kept.
        rows: The most rows that one sequence may return.
        vectors: The most names of vectors, modules and probes.
        vector_bytes: The most bytes of vectors under names and in the steering of every request
            (float32; equal vectors count once).
        pace: Requests with Weir's keys admitted per second while plain requests are served; each
            waits a second at most. 0 admits all at once.
        warm: Whether the server gets ready for requests that name what it was started with before it says
            that it is; `weir serve --weir-warm off` sets it to 0.
        directory: The directory of results; empty for the system's temporary directory.
        store: The URL of what several servers share; empty for none. `weir serve --weir-store` sets it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    body_bytes: Annotated[int, Field(ge=1 << 10)] = 128 << 20
    inline_default: Annotated[int, Field(ge=0)] = 64 << 10
    inline_bytes: Annotated[int, Field(ge=0)] = 8 << 20
    lens_bytes: Annotated[int, Field(ge=0)] = 256 << 20
    spool_bytes: Annotated[int, Field(ge=0)] = 4 << 30
    spool_seconds: Annotated[float, Field(gt=0, le=604_800)] = 600.0
    rows: Annotated[int, Field(ge=1)] = 1 << 20
    vectors: Annotated[int, Field(ge=1)] = 4096
    vector_bytes: Annotated[int, Field(ge=1 << 10)] = 1 << 30
    pace: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 64.0
    warm: bool = True
    directory: str = ""
    store: str = ""

    @classmethod
    def load(cls, environ: Mapping[str, str] = os.environ) -> ServerLimits:
        """Return the limits that the environment sets; raise WeirError naming a wrong variable."""
        warn_of_unknown(
            environ,
            PREFIX,
            [
                *map(str.upper, cls.model_fields),
                *(name.removeprefix(PREFIX) for name in (SAES, MODULES, HOOKS, LENSES, DEFAULT_CAPTURE, DEMO)),
            ],
        )
        variables = {name: PREFIX + name.upper() for name in cls.model_fields}
        values = {name: environ[variable] for name, variable in variables.items() if variable in environ}
        try:
            return cls(**values)  # type: ignore[arg-type]
        except ValidationError as e:
            first = e.errors()[0]
            raise WeirError(first["msg"], PREFIX + str(first["loc"][0]).upper()) from None
