"""`Positions`: selectors of the positions that a capture or an intervention is about.

Positions count from 0 over the prompt and then the generated tokens. With P prompt tokens the
sampled tokens are drawn from rows P-1, P, ... How many tokens are generated is unknown until the
request ends, so a selector answers for any position as if generation never stopped; the owner of
the rows cuts at the last position reached.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.fields import is_int, plain

KEYWORDS = ("all", "prompt", "generated", "last_prompt", "sampled")
_FORK_KEYWORDS = {"all_prompt": "prompt", "all_generated": "generated"}
"""Keywords of the fork RhizoNymph/vllm -> those that are meant."""
BY_TOKEN = ("token_ids", "not_token_ids", "special")
"""Selectors that look at the token at a position."""
MODALITIES = ("image", "audio", "video")
"""What a selector by modality can name."""
MAX_LIST = 65_536
MAX_LISTED = 1 << 18
"""Entries of all lists of positions and tokens in one request; workers read them inside a step."""
ENDLESS = 2**63 - 1
"""A position that is never reached."""
_MAX_POSITION = 2**31 - 1
_SLICE = re.compile(r"(-?\d+)?:(-?\d+)?(?::(-?\d+)?)?")


class Interval(NamedTuple):
    """Every `step`-th position from `start` on, before `stop`.

    Either bound counts from position 0, or from P, the length of the prompt.
    """

    start: int = 0
    stop: int = ENDLESS
    step: int = 1
    start_at_prompt: bool = False
    stop_at_prompt: bool = False

    def at(self, prompt_len: int) -> range:
        """Return the positions for a length of the prompt; what would come before position 0 is left out."""
        start, stop, step, start_at_prompt, stop_at_prompt = self
        if start_at_prompt:
            start = max(0, start + prompt_len)
        return range(start, stop + prompt_len if stop_at_prompt else stop, step)


_INTERVALS = {
    "all": Interval(),
    "prompt": Interval(stop=0, stop_at_prompt=True),
    "generated": Interval(start_at_prompt=True),
    "last_prompt": Interval(-1, 0, start_at_prompt=True, stop_at_prompt=True),
    "sampled": Interval(-1, start_at_prompt=True),
}
"""Keywords -> what they select."""


@dataclass(frozen=True)
class Positions:
    """A parsed selector.

    Attributes:
        kind: a keyword, ``"list"``, ``"slice"``, ``"modality"`` or one of `BY_TOKEN`. Before they
            select anything, ``"special"`` must be replaced by `with_special`, which knows the
            tokenizer's ids, and ``"modality"`` by `Media.positions`, which knows the prompt.
        values: its numbers: positions, (start, stop, step), or token ids; of ``"special"`` 1 for
            special tokens, 0 for all others; of ``"modality"`` an index of `MODALITIES`, and which
            of its items is meant, if not all are.
    """

    kind: str
    values: tuple[int | None, ...] = ()

    def __repr__(self) -> str:
        form = self.to_json()
        values = next(iter(form.values())) if isinstance(form, dict) else form
        if isinstance(values, list) and len(values) > 8:
            shown = f"[{', '.join(map(str, values[:8]))}, ... {len(values) - 8} more]"
            return f"Positions({shown if form is values else f'{{{self.kind!r}: {shown}}}'})"
        return f"Positions({form!r})"

    def shown(self, name: str) -> str:
        """Return the selector alone, for the repr of what holds it in a field."""
        return repr(self).removeprefix("Positions(").removesuffix(")")

    def __hash__(self) -> int:
        return self._hash  # computed once: a long list is looked up for every site that it is for

    def __reduce__(self) -> tuple[type, tuple]:
        return Positions, (self.kind, self.values)  # without what is cached here

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.values))

    @functools.cached_property
    def _ascending(self) -> np.ndarray:
        """`numbers` as int64 [n], ascending and each once."""
        return np.unique(np.asarray(self.numbers, np.int64))

    @functools.cached_property
    def interval(self) -> Interval | None:
        """What is selected; None for a list, and where that depends on more than positions."""
        if self.kind == "slice":
            start, stop, step = self.values
            negative = (start or 0) < 0, stop is not None and stop < 0
            return Interval(start or 0, ENDLESS if stop is None else stop, step or 1, *negative)
        return _INTERVALS.get(self.kind)

    @classmethod
    def parse(cls, selector: object, field: str = "positions") -> Positions:
        """Parse a selector in any of its public forms.

        Raises:
            WeirError: naming `field`, also for a selector that never selects a position.
        """
        if isinstance(selector, Positions):
            return selector
        if isinstance(selector, str):
            return cls._parse_text(selector, field)
        if isinstance(selector, dict):
            return cls._parse_dict(selector, field)
        selector = plain(selector)
        if is_int(selector):
            return cls("list", (_in_range(selector, field),))
        if isinstance(selector, range):
            selector = list(selector[: MAX_LIST + 1])
        selector = _listed(selector)
        if isinstance(selector, Sequence):
            values = _ints(selector, field)
            if not values:
                raise WeirError('an empty list selects no position; list some, or write "all"', field)
            return cls("list", values)
        raise WeirError(
            f"cannot read positions from {type(selector).__name__}; use one of {', '.join(KEYWORDS)}, an int, a list "
            "of ints, 'start:stop:step', {'token_ids': [...]}, {'not_token_ids': [...]}, {'special': false}, "
            "{'modality': 'image'} or {'modality': 'image', 'index': 0}",
            field,
        )

    @classmethod
    def _parse_text(cls, text: str, field: str) -> Positions:
        if text in KEYWORDS:
            return cls(text)
        match = _SLICE.fullmatch(text)
        if match is None or len(text) > 64:
            meant = f"did you mean {_FORK_KEYWORDS[text]!r}? " if text in _FORK_KEYWORDS else ""
            raise WeirError(
                f"unknown selector {text[:80]!r}; {meant}use one of {', '.join(KEYWORDS)} or 'start:stop:step'", field
            )
        start, stop, step = (None if part is None else int(part) for part in match.groups())
        if step is not None and step < 1:
            raise WeirError(f"the step of {text!r} must be at least 1", field)
        bounds = tuple(None if v is None else _in_range(v, field) for v in (start, stop, step))
        if _is_empty(start or 0, stop):
            raise WeirError(
                f"{text!r} selects no position: its stop does not come after its start; 'start:' goes on to the end",
                field,
            )
        return cls("slice", bounds)

    @classmethod
    def _parse_dict(cls, selector: dict, field: str) -> Positions:
        if set(selector) == {"modality", "index"}:
            return cls._parse_modality(selector["modality"], field, selector["index"])
        kind = next(iter(selector), None)
        if len(selector) != 1 or kind not in (*BY_TOKEN, "modality"):
            beside = "; 'modality' may have 'index' beside it" if {"modality", "index"} & set(selector) else ""
            raise WeirError(
                f"a selector dict has one key, {', '.join(map(repr, BY_TOKEN))} or 'modality'; got "
                f"{sorted(map(brief, selector))[:5]}{beside}",
                field,
            )
        if kind == "modality":
            return cls._parse_modality(selector[kind], field)
        field = f"{field}.{kind}"
        if kind == "special":
            if not isinstance(selector[kind], (bool, np.bool_)):
                raise WeirError("true for positions of special tokens, false for all others", field)
            return cls(kind, (int(selector[kind]),))
        ids = _listed(plain(selector[kind]))
        if is_int(ids):
            ids = [ids]
        if isinstance(ids, str) or not isinstance(ids, Sequence):
            raise WeirError(f"{kind} is a list of ints", field)
        values = _ints(ids, field)
        if any(v < 0 for v in values):
            raise WeirError("a token id is never negative", field)
        if kind == "token_ids" and not values:
            raise WeirError("an empty list selects no position; list some token ids", field)
        return cls(kind, tuple(sorted(set(values))))

    @classmethod
    def _parse_modality(cls, name: object, field: str, *index: object) -> Positions:
        if not isinstance(name, str) or name not in MODALITIES:
            raise WeirError(f"a modality is one of {', '.join(MODALITIES)}; got {brief(name)}", f"{field}.modality")
        chosen = [plain(number) for number in index]
        for number in chosen:
            if not is_int(number) or not -MAX_LIST <= number < MAX_LIST:
                raise WeirError(
                    f"expected which {name} of the prompt, an int: 0 is the first and -1 the last; got {brief(number)}",
                    f"{field}.index",
                )
        return cls("modality", (MODALITIES.index(name), *map(int, chosen)))

    def with_special(self, special_ids: Sequence[int]) -> Positions:
        """Replace ``"special"`` by the ids of the tokenizer's special tokens."""
        if self.kind != "special":
            return self
        return Positions("token_ids" if self.values[0] else "not_token_ids", tuple(sorted(set(special_ids))))

    def to_json(self) -> str | list | dict:
        """Return the wire form, which ``Positions.parse`` reads back."""
        if self.kind == "list":
            return list(self.values)
        if self.kind == "slice":
            return ":".join("" if v is None else str(v) for v in self.values).removesuffix(":")
        if self.kind == "special":
            return {"special": bool(self.values[0])}
        if self.kind == "modality":
            return {"modality": self.modality} | ({} if self.index is None else {"index": self.index})
        if self.needs_token_ids:
            return {self.kind: list(self.values)}
        return self.kind

    def mask(self, positions: np.ndarray, prompt_len: int, token_ids: np.ndarray | None = None) -> np.ndarray:
        """Return which of `positions` are selected.

        Args:
            positions: int array [n] of absolute positions.
            prompt_len: P.
            token_ids: int array [n], the token at each position, -1 where it is not known: such a
                position is not selected by its token. None where no token is known: then a selector
                by token selects every position, a superset to be filtered later.

        Returns:
            bool array [n].
        """
        if self.kind == "list":
            return _among(positions, self._reached(prompt_len))
        if self.interval is None:
            self._require_ids()
            return np.ones(len(positions), bool) if token_ids is None else self._token_mask(token_ids)
        chosen = self.interval.at(prompt_len)
        start, stop, step = chosen.start, chosen.stop, chosen.step
        if stop == start + 1:
            return positions == start
        if stop == ENDLESS:
            mask = positions >= start
        else:
            mask = positions < stop
            if start:
                mask &= positions >= start
        if step > 1:
            mask &= (positions - start) % step == 0
        return mask

    def listed(self, prompt_len: int) -> np.ndarray | None:
        """Return the absolute positions of a list, int64 [n] ascending and each once; None for any other selector."""
        return self._reached(prompt_len) if self.kind == "list" else None

    def _reached(self, prompt_len: int) -> np.ndarray:
        """Return the absolute positions of a list that are not below 0, int64 [n] ascending and each once.

        Negative values count from the prompt's end.
        """
        values = self._ascending
        if not len(values) or values[0] >= 0:
            return values
        known = self.__dict__.get("_known")
        if known is None or known[0] != prompt_len:
            resolved = np.unique(np.where(values < 0, values + prompt_len, values))
            known = self.__dict__["_known"] = prompt_len, resolved[resolved >= 0]
        return known[1]

    def _token_mask(self, token_ids: np.ndarray) -> np.ndarray:
        """Return which tokens are selected, whatever their positions."""
        if self.kind == "token_ids":
            return _among(token_ids, self._ascending)
        return ~_among(token_ids, self._ascending) & (token_ids >= 0)

    def _require_ids(self) -> None:
        assert self.kind != "special", "with_special must replace 'special' before positions are selected"
        assert self.kind != "modality", "Media.positions must replace a modality before positions are selected"

    def first(self, prompt_len: int, prompt_token_ids: Sequence[int] | None = None) -> int | None:
        """Return the first position that can be selected, or None.

        A prefix-cache hit must not pass it.
        """
        if self.kind == "list":
            return next(iter(self._reached(prompt_len)[:1].tolist()), None)
        if self.interval is not None:
            chosen = self.interval.at(prompt_len)
            return chosen.start if chosen else None
        self._require_ids()
        if prompt_token_ids is None:
            return 0
        hits = np.flatnonzero(self._token_mask(np.asarray(prompt_token_ids)))
        return int(hits[0]) if len(hits) else prompt_len

    def steady(self, prompt_len: int) -> tuple[int, bool] | None:
        """Return (position, selected): from there on, all positions are selected or none is.

        None if there is no such position. For a selector by token, the answer is about the superset
        that `mask` returns without tokens.
        """
        if self.kind == "list":
            return max(self._reached(prompt_len)[-1:].tolist(), default=-1) + 1, False
        if (interval := self.interval) is None:
            return prompt_len, True
        chosen = interval.at(prompt_len)
        if chosen.stop != ENDLESS:
            return max(0, chosen.stop), False
        return (chosen.start, True) if chosen.step == 1 else None

    def bounds(self, prompt_len: int) -> tuple[int, int] | None:
        """Return (first, end) if exactly first..end-1 are selected; None if that is not known."""
        if self.kind == "list":
            reached = self._reached(prompt_len)
            first, last = (int(reached[0]), int(reached[-1])) if len(reached) else (0, -1)
            return (first, last + 1) if last - first + 1 == len(reached) else None
        if (interval := self.interval) is None or interval.step > 1:
            return None
        chosen = interval.at(prompt_len)
        return chosen.start, max(chosen.start, chosen.stop)

    def count(self, prompt_len: int | None = None) -> int | None:
        """Return how many positions the selector names; None if it does not say so, or names none.

        Positions of a list count once, and those before position 0 do not count. A selector that
        ends with the prompt needs `prompt_len`.
        """
        if self.kind == "list":
            return len(self._ascending if prompt_len is None else self._reached(prompt_len)) or None
        chosen = self.interval
        if chosen is None or chosen.stop == ENDLESS:
            return None
        if prompt_len is not None:
            return len(chosen.at(prompt_len)) or None
        same = chosen.start_at_prompt == chosen.stop_at_prompt
        return len(range(chosen.start, chosen.stop, chosen.step)) or None if same else None

    def rank(self, position: int, prompt_len: int) -> int:
        """Return how many selected positions come before the selected `position`.

        Not for a selector by token.
        """
        if self.kind == "list":
            return int(np.searchsorted(self._reached(prompt_len), position))
        assert self.interval is not None, "the rank among positions chosen by token is unknown"
        return (position - self.interval.at(prompt_len).start) // self.interval.step

    def reaches(self, prompt_len: int, end: int) -> bool:
        """Return whether a request can have a selected row.

        A selector by token counts as reached, since its tokens are not known here.

        Args:
            prompt_len: P.
            end: one past the request's last position that has a row.
        """
        if self.interval is None and self.kind != "list":
            return True
        first = self.first(prompt_len)
        return first is not None and first < end

    @property
    def end(self) -> int:
        """The shortest prompt with which no generated position is selected; `ENDLESS` if there is none."""
        if self.kind == "list":
            return max(-1, *self.numbers) + 1 if self.numbers else 0
        if self.interval is None:
            return ENDLESS
        return 0 if self.interval.stop_at_prompt else self.interval.stop

    @property
    def numbers(self) -> tuple[int, ...]:
        """The values of a list, or the ids of a selector by token."""
        return tuple(v for v in self.values if v is not None) if self.kind == "slice" else self.values  # type: ignore[return-value]

    @property
    def modality(self) -> str:
        """What a selector by modality names; "" for any other."""
        return MODALITIES[self.values[0] or 0] if self.kind == "modality" else ""

    @property
    def index(self) -> int | None:
        """Which item of its modality a selector names, negative from the last; None for all, or no modality."""
        return self.values[1] if self.kind == "modality" and len(self.values) > 1 else None

    @property
    def is_open(self) -> bool:
        """Whether the number of selected positions depends on more than the prompt's length."""
        if self.kind in ("list", "modality"):
            return False
        return self.interval is None or self.interval.stop == ENDLESS

    @property
    def needs_token_ids(self) -> bool:
        """Whether selecting depends on the token at a position."""
        return self.kind in BY_TOKEN


def check_listed(selectors: Iterable[tuple[str, object]]) -> None:
    """Raise WeirError if the selectors of a request list more than `MAX_LISTED` entries, before they are parsed.

    Args:
        selectors: each with the field that errors name.
    """
    count = 0
    for field, selector in selectors:
        listed = next(iter(selector.values()), None) if isinstance(selector, Mapping) else selector
        count += len(listed) if isinstance(listed, (list, tuple)) else 0
        if count > MAX_LISTED:
            raise WeirError(
                f"up to here, the selectors of the request list {count} positions and tokens, more than the limit of "
                f"{MAX_LISTED}; use slices or keywords, or send separate requests",
                field,
            )


def _is_empty(start: int, stop: int | None) -> bool:
    """Return whether a slice selects nothing, however long the prompt is."""
    if stop is None:
        return False
    return stop <= start if (start < 0) == (stop < 0) else stop == 0


def _listed(values: object) -> object:
    """Turn an array or tensor of one dimension into a list; return anything else as it is."""
    return values.tolist() if getattr(values, "ndim", None) == 1 and hasattr(values, "tolist") else values


def _in_range(value: Any, field: str) -> int:
    if not -_MAX_POSITION <= value <= _MAX_POSITION:
        raise WeirError(f"position {brief(value)} is out of range", field)
    return int(value)


def _ints(values: Sequence | np.ndarray, field: str) -> tuple[int, ...]:
    if len(values) > MAX_LIST:
        raise WeirError(f"{len(values)} entries, more than the limit of {MAX_LIST}; use a slice or a keyword", field)
    if set(map(type, values)) == {int} and -_MAX_POSITION <= min(values) <= max(values) <= _MAX_POSITION:
        return tuple(values)  # the usual case
    numbers = []
    for i, value in enumerate(values):
        number = plain(value)
        if not is_int(number):
            raise WeirError(f"expected an int, got {type(value).__name__}", f"{field}[{i}]")
        numbers.append(_in_range(number, f"{field}[{i}]"))
    return tuple(numbers)


def _among(values: np.ndarray, ascending: np.ndarray) -> np.ndarray:
    """Return which of `values` are among others; for a few values that takes no time in proportion to the others."""
    at = np.searchsorted(ascending, values)
    at[at == len(ascending)] = 0
    return ascending[at] == values if len(ascending) else np.zeros(len(values), bool)
