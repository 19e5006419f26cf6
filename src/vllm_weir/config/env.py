"""Weir's environment variables: the switch WEIR_DISABLE, and a warning about misspelt ones."""

from __future__ import annotations

import difflib
import functools
import logging
import os
from collections.abc import Collection, Mapping

logger = logging.getLogger(__name__)
OFF = "Weir is switched off (WEIR_DISABLE is set)"
MAX_LISTED = 8
"""A warning lists the known names if there are no more than this."""


def disabled(environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get("WEIR_DISABLE", "").strip().lower() not in ("", "0", "false", "no")


def warn_of_unknown(
    environ: Mapping[str, str], prefix: str, known: Collection[str], others: tuple[str, ...] = ()
) -> None:
    for variable in environ:
        name = variable.removeprefix(prefix)
        if name != variable and name not in known and not name.startswith(others):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else ""
            if len(known) <= MAX_LISTED:
                hint += f"{'' if near else ';'} known are {', '.join(prefix + name for name in known)}"
            _warn(variable, hint)


@functools.cache
def _warn(variable: str, hint: str) -> None:
    logger.warning("Weir does not know the environment variable %s and ignores it%s", variable, hint)
