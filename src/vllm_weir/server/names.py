"""The names that a server keeps vectors and autoencoders under."""

from __future__ import annotations

import re

from vllm_weir.errors import WeirError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)


def check_name(name: str, field: str = "name") -> None:
    """Raise WeirError, naming `field`, if this cannot be a name."""
    if not NAME.fullmatch(name) or _DIGEST.fullmatch(name):
        raise WeirError(
            "a name has 1 to 128 letters, digits and . _ : @ + -, begins with a letter or digit, and is not a digest",
            field,
        )
