"""`When`, the condition of a gate; names of controllers; rules about scores that end generation."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.fields import (
    is_int,
    loads,
    parse_flag,
    plain,
    refuse_unknown_keys,
    right_words,
    set_fields,
    with_fields,
)
from vllm_weir.schema.probe_base import parse_name as parse_probe_name
from vllm_weir.schema.sinks import SinkDefinition, parse_name
from vllm_weir.schema.vectors import number

PREFIX = "controller:"
"""Comes before a controller's name where probes and sinks have theirs."""
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def parse_controllers(data: object, path: str = "settings.controllers") -> dict[str, SinkDefinition]:
    """Parse name -> ``{controller: options}``, given as a mapping or the same as JSON text.

    A controller is an entry point of the group ``vllm_weir.controllers``, or ``module:class``. The
    other keys are those of a sink, but for ``"keep"``.
    """
    if isinstance(data, str):
        data = loads(data, path)
    if not isinstance(data, Mapping):
        raise WeirError(f"expected an object, got {type(data).__name__}", path)
    out = {}
    for name, given in data.items():
        at = f"{path}.{brief(name)}"
        definition = out[parse_name(name, path, "controller")] = SinkDefinition.parse(given, at, plugin=_parse_class)
        if definition.keep != "always":
            raise WeirError("a controller gets every sequence; leave keep out", f"{at}.keep")
    return out


def _parse_class(name: object, path: str) -> str:
    """Parse the name of an installed controller, or ``module:class``."""
    if isinstance(name, str) and _CLASS.fullmatch(name):
        return name
    return parse_name(name, path, "controller")


MAX_OUTPUT = 2**20
MAX_FEATURE = 2**31 - 1
MAX_SAE_NAME = 256
Metric = Literal["score", "cosine"]
COSINE_PREFIX = "cosine:"
"""Comes before a probe's name where its cosine similarities have theirs."""
SAE_PREFIX = "sae:"
"""Comes before an autoencoder's name where probes have theirs."""
_FEATURE_NAME = re.compile(rf"({SAE_PREFIX}.+)\[(\d+)\](?: at .*)?", re.DOTALL)


def feature_name(probe: str, feature: int, more: str = "") -> str:
    """Return the name of what gives a feature's activation; `more` tells two readings of it in a request apart."""
    return f"{probe}[{feature}]" + (f" at {more}" if more else "")


def split_feature_name(name: str) -> tuple[str, int | None]:
    """Return `When.probe` and `When.feature` of which a name of a probe came about."""
    match = _FEATURE_NAME.fullmatch(name)
    return (name, None) if match is None else (match[1], int(match[2]))


def parse_feature(value: object, field_name: str) -> int:
    """Return the number of a feature; raise WeirError naming the field."""
    value = plain(value)
    if not is_int(value) or not 0 <= value <= MAX_FEATURE:  # type: ignore[operator]
        raise WeirError(f"features are ints from 0, got {brief(value)}", field_name)
    return int(value)  # type: ignore[call-overload]


@right_words
@dataclass(frozen=True)
class When:
    """Let an intervention act only where a probe's score says so.

    Args:
        probe: name of one of the request's probes, or of a registered one. ``"controller:NAME"``,
            with nothing else, lets a sync controller of the engine decide, at generated tokens. With
            `feature`, ``"sae:NAME"``: a sparse autoencoder that the engine has loaded.
        above: the intervention acts where the score is above this.
        below: or where it is below this; exactly one of the two.
        latch: once it has acted, it acts at every later position too.
        delay: 0: the score at a position decides on that position, for which the probe has to read
            before the intervention acts (at `resid_post` for one at the next block's `resid_pre`); 1: the
            score at the position before it does.
        sharpness: instead of switching, multiply what the intervention adds by
            ``sigmoid(sharpness * (score - above))``, or by ``sigmoid(sharpness * (below - score))``.
        output: which of the probe's scores; may be left out if it has one.
        feature: of the autoencoder; its activation is the score, which the request's output has as
            ``scores["sae:NAME[7]"]``. An intervention at the hook point that the autoencoder reads is gated by
            the row before all interventions there, one at a later hook point by the row after them.
            TopK, and autoencoders that normalise each row, are refused.
        metric: ``"cosine"``: the score is the cosine similarity of the row and the weight of a linear probe, from -1
            to 1, and 0 for a row of zeros; its bias and activation do not count, its smoothing and positions do. The
            request's output has it as ``scores["cosine:NAME"]``. ``"score"``: the probe's score.

    Where the probe scores no row, its last score counts; before the first one nothing happens.

    Raises:
        WeirError: naming the field.
    """

    wire_fields: ClassVar[tuple[str, ...]] = (
        "probe", "above", "below", "latch", "delay", "sharpness", "output", "feature", "metric",
    )  # fmt: skip
    probe: str
    above: float | None = None
    below: float | None = None
    latch: bool = False
    delay: int = 0
    sharpness: float | None = None
    output: int | None = None
    feature: int | None = None
    metric: Metric = "score"
    path: str = field(default="when", repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.metric not in get_args(Metric):
            raise WeirError(
                f"unknown metric {brief(self.metric)!r}; choose from {', '.join(get_args(Metric))}",
                f"{self.path}.metric",
            )
        if self.feature is None:
            parse_probe_name(self.probe, f"{self.path}.probe")
        else:
            self._parse_feature()
        if self.controller:
            self._refuse_rules()
            return
        if (self.above is None) == (self.below is None):
            given = "neither" if self.above is None else "both"
            raise WeirError(f"give above or below, got {given}", f"{self.path}.above")
        side = "below" if self.above is None else "above"
        set_fields(self, **{side: number(getattr(self, side), f"{self.path}.{side}")})
        parse_flag(self.latch, "latch", self.path)
        delay = plain(self.delay)
        if not is_int(delay) or delay not in (0, 1):
            raise WeirError(f"delay is 0 or 1 tokens, got {brief(delay)}", f"{self.path}.delay")
        set_fields(self, delay=int(delay))
        if self.sharpness is not None:
            self._parse_sharpness()
        if self.output is not None:
            output = plain(self.output)
            if not is_int(output) or not 0 <= output <= MAX_OUTPUT:
                raise WeirError(f"outputs are ints from 0, got {brief(output)}", f"{self.path}.output")
            set_fields(self, output=int(output))

    def _parse_feature(self) -> None:
        name = self.probe.removeprefix(SAE_PREFIX) if isinstance(self.probe, str) else ""
        if not isinstance(self.probe, str) or name == self.probe or not 0 < len(name) <= MAX_SAE_NAME:
            raise WeirError(
                f"a feature is one of a loaded autoencoder, 'sae:NAME', got {brief(self.probe)!r}; leave feature out "
                "for a probe",
                f"{self.path}.probe",
            )
        if self.output is not None:
            raise WeirError("a feature has one activation; leave output out", f"{self.path}.output")
        if self.metric != "score":
            raise WeirError("a gate by a feature looks at its activation; leave metric out", f"{self.path}.metric")
        set_fields(self, feature=parse_feature(self.feature, f"{self.path}.feature"))

    @property
    def sae(self) -> str:
        """Name of the autoencoder whose feature decides; empty if none does."""
        return "" if self.feature is None else self.probe.removeprefix(SAE_PREFIX)

    def _refuse_rules(self) -> None:
        """Raise WeirError if there is a rule beside the controller."""
        for name, default in (
            ("latch", False),
            ("delay", 0),
            ("sharpness", None),
            ("output", None),
            ("metric", "score"),
        ):
            if getattr(self, name) != default:
                raise WeirError(
                    f"{self.probe!r} without above or below is a controller, which gives the strength itself; leave "
                    f"{name} out",
                    f"{self.path}.{name}",
                )

    @property
    def controller(self) -> str:
        """Name of the controller that decides; empty if a probe does."""
        if self.above is not None or self.below is not None:
            return ""
        return self.probe.removeprefix(PREFIX) if self.probe.startswith(PREFIX) else ""

    def _parse_sharpness(self) -> None:
        at = f"{self.path}.sharpness"
        sharpness = number(self.sharpness, at)
        if sharpness <= 0:
            raise WeirError("sharpness is above 0; use below instead of above to turn the gate round", at)
        if self.latch:
            raise WeirError("a latch switches, and a sigmoid does not; leave latch or sharpness out", at)
        set_fields(self, sharpness=sharpness)

    @classmethod
    def parse(cls, data: object, path: str) -> When | None:
        """Parse a `When`, its wire form, or None; raise WeirError for unknown keys."""
        if data is None:
            return None
        if isinstance(data, When):
            return data if data.path == path else with_fields(data, path=path)
        if not isinstance(data, Mapping):
            raise WeirError(f"expected weir.When(...) or an object, got {type(data).__name__}", path)
        refuse_unknown_keys(data, cls.wire_fields, path)
        if "probe" not in data:
            raise WeirError("missing", f"{path}.probe")
        return cls(**data, path=path)

    @property
    def threshold(self) -> float:
        """The score that decides."""
        return self.above if self.above is not None else self.below  # type: ignore[return-value]

    def to_json(self) -> dict[str, Any]:
        """Return the wire form, defaults left out."""
        values = {name: getattr(self, name) for name in self.wire_fields}
        if not self.latch:
            del values["latch"]
        if not self.delay:
            del values["delay"]
        if self.metric == "score":
            del values["metric"]
        return {name: value for name, value in values.items() if value is not None}


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
