"""Weir's environment variables: its switch, and a warning of those that are misspelt and would be ignored."""

from __future__ import annotations

import difflib
import functools
import logging
import os
from collections.abc import Collection, Mapping

logger = logging.getLogger(__name__)
OFF = "Weir is switched off (WEIR_DISABLE is set)"
FEW = 8
"""So many known names are told."""


def disabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ``WEIR_DISABLE`` switches Weir off in this process."""
    return environ.get("WEIR_DISABLE", "").strip().lower() not in ("", "0", "false", "no")


def warn_of_unknown(
    environ: Mapping[str, str], prefix: str, known: Collection[str], others: tuple[str, ...] = ()
) -> None:
    """Log a warning, once a process, for each variable that begins with `prefix` and has no meaning.

    Args:
        known: names that have one, without the prefix.
        others: how names begin that are somebody else's to check.
    """
    for variable in environ:
        name = variable.removeprefix(prefix)
        if name != variable and name not in known and not name.startswith(others):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else ""
            if len(known) <= FEW:
                hint += f"{'' if near else ';'} known are {', '.join(prefix + name for name in known)}"
            _warn(variable, hint)


@functools.cache
def _warn(variable: str, hint: str) -> None:
    logger.warning("the environment variable %s is none that Weir knows, and is ignored%s", variable, hint)
