"""What a server allows its clients: ``WEIR_SERVE_*`` environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_weir.config.env import warn_of_unknown
from vllm_weir.errors import WeirError

PREFIX = "WEIR_SERVE_"
ADMIN_KEY = "WEIR_ADMIN_KEY"


class ServerLimits(BaseModel):
    """Bounds of one server; each is ``WEIR_SERVE_<NAME>``.

    Attributes:
        body_bytes: largest request body; a larger one is answered with 413 before it is read whole.
        inline_default: bytes of rows that a choice carries itself when the request does not say.
        inline_bytes: most that a request may ask for, and, where Weir's routes are off, most that a choice carries.
        lens_bytes: most bytes of rows (before compression) in an answer to vllm-lens's keys, which are always inline.
        spool_bytes: bytes of results kept to be fetched; the oldest go first.
        spool_seconds: how long a result is kept.
        rows: most rows that one sequence may ask to have returned.
        vectors: most names of vectors and modules.
        vector_bytes: most bytes of all that is kept under names or steers every request (float32, equal vectors once).
        pace: requests with Weir's keys that enter in a second while plain ones are served, none later than in a second;
            0: as many as come.
        directory: where results lie; empty: the system's temporary directory.
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
    directory: str = ""

    @classmethod
    def load(cls, environ: Mapping[str, str] = os.environ) -> ServerLimits:
        """From the environment; raises WeirError naming a bad variable."""
        warn_of_unknown(environ, PREFIX, [name.upper() for name in cls.model_fields])
        given = {n: environ[PREFIX + n.upper()] for n in cls.model_fields if PREFIX + n.upper() in environ}
        try:
            return cls(**given)  # type: ignore[arg-type]
        except ValidationError as e:
            first = e.errors()[0]
            raise WeirError(first["msg"], PREFIX + str(first["loc"][0]).upper()) from None
