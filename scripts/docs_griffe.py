"""Griffe extension: ``a, b: text`` in a docstring's list of arguments stands for two arguments with one text."""

from __future__ import annotations

import re
from typing import Any

import griffe

_GROUPED = re.compile(r"^( +)(\w+(?:, \w+)+):( .*(?:\n\1 +.*)*)", re.M)


class GroupedArguments(griffe.Extension):
    """Write the text once for each argument, so that each gets a row with its type."""

    def on_object(self, *, obj: griffe.Object, **_more: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _GROUPED.sub(_each, obj.docstring.value)


def _each(match: re.Match[str]) -> str:
    indent, names, text = match.groups()
    return "\n".join(f"{indent}{name}:{text}" for name in names.split(", "))
