"""Rules of ``stop_when``: comparisons with probes' scores that end generation."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import NamedTuple

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.vectors import number

MAX_RULES, MAX_CHARS = 64, 512
# No two neighbouring parts can take the same characters, so the time to match is linear in a text's length.
_RULE = re.compile(r"([^<>=\[\]]*[^<>=\[\]\s])\s*(?:\[\s*(\d{1,6})\s*\]\s*)?(>=|<=|>|<)\s*([^<>=\s]+)", re.ASCII)
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)


class StopRule(NamedTuple):
    """End generation with the first generated token whose score compares so.

    Attributes:
        name: of the probe; ``stop_reason`` is ``"probe:<name>"``.
        probe: its index among the request's probes.
        output: which of its scores.
        op: ``">"``, ``">="``, ``"<"`` or ``"<="``.
        threshold: compared with the score; a float32.
    """

    name: str
    probe: int
    output: int
    op: str
    threshold: float


class StopText(NamedTuple):
    """A rule as it was written.

    Attributes:
        name: of a probe.
        output: which of its scores; None if the rule does not say.
        op: as of `StopRule`.
        threshold: likewise.
        path: named by errors.
    """

    name: str
    output: int | None
    op: str
    threshold: float
    path: str = "stop_when"

    def __str__(self) -> str:
        output = "" if self.output is None else f"[{self.output}]"
        return f"{self.name}{output} {self.op} {self.threshold!r}"


def parse_stop_when(rules: object, path: str) -> tuple[StopText, ...]:
    """Parse a rule such as ``"name > 0.9"`` or ``"name[1] <= 0.2"``, a list of rules, or None.

    Raises:
        WeirError: naming the rule that cannot be read.
    """
    if rules is None:
        return ()
    if isinstance(rules, (str, StopText)):
        return (_parse(rules, path),)
    if isinstance(rules, bytes) or not isinstance(rules, Sequence):
        raise WeirError(f"expected a rule, or a list of rules, got {type(rules).__name__}", path)
    if len(rules) > MAX_RULES:
        raise WeirError(f"{len(rules)} rules, more than the limit of {MAX_RULES}", path)
    return tuple(_parse(rule, f"{path}[{i}]") for i, rule in enumerate(rules))


def _parse(rule: object, path: str) -> StopText:
    if isinstance(rule, StopText):
        return rule._replace(path=path)
    if not isinstance(rule, str) or len(rule) > MAX_CHARS:
        raise WeirError(f"a rule is a text like 'name > 0.9' of at most {MAX_CHARS} characters", path)
    match = _RULE.fullmatch(rule.strip(string.whitespace))
    if match is None or not _NUMBER.fullmatch(match[4]):
        raise WeirError(
            f"cannot read {brief(rule, 80)!r}; write 'name > 0.9', or 'name[1] <= 0.2' for the second score of a probe "
            "(>, >=, < or <=)",
            path,
        )
    name, output, op, threshold = match.groups()
    return StopText(name, None if output is None else int(output), op, number(float(threshold), path), path)
