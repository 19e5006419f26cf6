"""`NamedPath`: an option that names a sparse autoencoder, ``name=path`` or ``name=path@hook.layer``."""

from __future__ import annotations

import re
from typing import NamedTuple

from vllm_weir.errors import WeirError, brief

_SITE = re.compile(r"^(.+)@([a-z_]+)\.(\d{1,4})$", re.ASCII | re.DOTALL)


class NamedPath(NamedTuple):
    """A sparse autoencoder's name, its path, and the hook point that it reads (None: as its file says)."""

    name: str
    path: str
    site: tuple[str, int] | None = None

    @classmethod
    def parse(cls, text: str, field: str) -> NamedPath:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise WeirError(f"expected NAME=PATH or NAME=PATH@HOOK.LAYER, got {brief(text)!r}", field)
        match = _SITE.match(path)
        return cls(name, path) if match is None else cls(name, match[1], (match[2], int(match[3])))
