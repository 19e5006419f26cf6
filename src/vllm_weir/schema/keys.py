"""The request keys that are Weir's, where each may stand, and misspelt or misplaced ones.

Standard library only: the guard, which refuses requests while Weir cannot be loaded, imports this.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_weir.errors import WeirError

WIRE_KEY = "weir"
LENS_CAPTURE_KEY = "output_residual_stream"
LENS_STEER_KEY = "apply_steering_vectors"
LENS_HOOKS_KEY = "apply_hooks"
LENS_QK_KEY = "output_qk"
LENS_TRANSPORT_KEY = "activations_transport"
LENS_KEYS = (LENS_CAPTURE_KEY, LENS_QK_KEY, LENS_STEER_KEY, LENS_HOOKS_KEY, LENS_TRANSPORT_KEY)
KEYS = (WIRE_KEY, *LENS_KEYS)
"""Keys of ``SamplingParams.extra_args`` that are Weir's to honour or refuse."""
FORK_NAME = "steering_name"
FORK_TIERS = tuple(f"{tier}steering_{kind}" for kind in ("vectors", "clamps") for tier in ("", "prefill_", "decode_"))
FORK_FIELDS = (FORK_NAME, *FORK_TIERS)
"""Fields of a request's body in the fork RhizoNymph/vllm."""
FORK_LISTS = ("steering", "patch", "patch_vectors")
"""More of them, whose names are too short, or too common, to look for misspelt ones."""
FORK_REFUSED = {
    "capture_wait": "an answer comes when its rows, or its sinks, are done; leave it out",
    "conversation_id": "no state is kept between the requests of a conversation; leave it out",
}
"""Those that no request may carry, and why; a ``conversation_id`` only beside others, as not only the fork has it."""
LORA_KEY = "lora_request"
"""Field of a request's body that Weir adds to vLLM's."""
PROJECTED_KEYS = ("positions", "token_ids", "sites", "positions_of", "token_ids_of")
"""What the scores of captures hold in a response; those of a probe stand beside them, under its name."""

_MAX_MISSPELT = 40
"""Longer names are not taken for misspelt keys; this also bounds what `meant` caches."""
_SHORT = (WIRE_KEY, LENS_QK_KEY)
"""Keys from which another plugin's may differ in one letter."""
_OTHER_NAMES = {
    "weirs": WIRE_KEY,
    "vllmweir": WIRE_KEY,
    "residualstream": LENS_CAPTURE_KEY,
    "residualstreams": LENS_CAPTURE_KEY,
    "outputresidual": LENS_CAPTURE_KEY,
    "steeringvector": LENS_STEER_KEY,
    "applysteering": LENS_STEER_KEY,
}
"""Other names that people write -> the key that is meant; in small letters without punctuation."""
_INNER_KEYS = {
    "capture": "capture",
    "captures": "capture",
    "interventions": "interventions",
    "intervention": "interventions",
    "probes": "probes",
    "stop_when": "stop_when",
}
"""Keys that belong inside the object under `WIRE_KEY` -> the name there."""


def carries_keys(extra_args: Mapping[str, Any] | None) -> bool:
    """Return whether a request has one of Weir's keys."""
    if extra_args:
        for key in KEYS:
            if extra_args.get(key) is not None:
                return True
    return False


def refuse_lens(extra_args: Mapping[str, Any]) -> None:
    """Raise WeirError if a client's request carries functions of vllm-lens's."""
    if extra_args.get(LENS_HOOKS_KEY) is not None:
        raise WeirError(
            "code never comes over HTTP; the server's operator loads a function with --weir-hook "
            "NAME=module:attribute, and requests name it",
            LENS_HOOKS_KEY,
        )


@functools.lru_cache(maxsize=1024)
def meant(key: str, in_body: bool = False) -> str | None:
    """Return the key of Weir's that `key` misspells, or None.

    A misspelt key has other capitals or punctuation, two neighbouring letters swapped or one letter
    doubled; a long key also any one letter missing, added or changed. Short keys are judged more
    strictly because other plugins have keys of their own: ``wire``, ``weight``, ``heir`` and
    ``weird`` are not taken for ``weir``.

    Args:
        key: as the request has it.
        in_body: whether `key` is a field of a request's body, so that one of the fork's fields may
            be meant too.
    """
    if key in KEYS or key in FORK_FIELDS or len(key) > _MAX_MISSPELT:
        return None
    letters = _letters(key)
    if letters in _OTHER_NAMES and not in_body:
        return _OTHER_NAMES[letters]
    # A request may have a hundred thousand keys of others: nearly all are told apart by their ends alone.
    for own in (*_BY_END.get(letters[:2], ()), *_BY_END.get(letters[-2:], ())):
        if own in FORK_FIELDS and not in_body:
            continue
        own_letters = _LETTERS[own]
        if letters == own_letters or _swapped_or_doubled(letters, own_letters):
            return own
        if own not in _SHORT and _one_letter_off(letters, own_letters):
            return own
    return _OTHER_NAMES.get(letters)


def refuse_slips(extra_args: Mapping[str, Any]) -> None:
    """Raise WeirError for a misspelt key of ``SamplingParams.extra_args``; vLLM ignores those."""
    for key, value in extra_args.items():
        if key in KEYS or value is None:
            continue
        if key in FORK_FIELDS:
            raise _fork_field_offline(key)
        if (error := _slip(key, value)) is not None:
            raise error


def asks(xargs: Mapping[str, Any] | None, body: Mapping[str, Any] | None) -> bool:
    """Return whether an HTTP request has a key of Weir's, or one that `misplaced` refuses.

    Args:
        xargs: its ``vllm_xargs``.
        body: the fields that vLLM does not know.
    """
    if not xargs and not body:  # as in nearly every plain request
        return False
    if fork_fields(body) or misplaced(xargs, body) is not None:
        return True
    return any(place.get(k) is not None for _, place in places(xargs or {}, body or {}) for k in KEYS)


def fork_fields(body: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fork's fields that a request has."""
    if not body:
        return {}
    found = {key: body[key] for key in FORK_LISTS if _is_the_forks(body.get(key))}
    return found | {key: body[key] for key in FORK_FIELDS if body.get(key) is not None}


def _is_the_forks(value: Any) -> bool:
    """Return whether a field of `FORK_LISTS` is meant; whatever else has a common name is somebody else's."""
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], Mapping)
    return isinstance(value, Mapping) and "shape" in value


def places(xargs: Mapping[str, Any], body: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return where an HTTP request may have Weir's keys: (message prefix, the mapping there)."""
    extra = body.get("extra_args")
    return [
        ("vllm_xargs.", xargs),
        ("", {WIRE_KEY: body.get(WIRE_KEY)}),
        ("extra_args.", extra if isinstance(extra, Mapping) else {}),
    ]


def misplaced(xargs: Mapping[str, Any] | None, body: Mapping[str, Any] | None) -> WeirError | None:
    """Return the error for a key of Weir's that is misplaced or misspelt; None if there is none."""
    return next(_misplaced(xargs or {}, body or {}), None)


def slip(xargs: Mapping[str, Any] | None, body: Mapping[str, Any] | None) -> WeirError | None:
    """Return the error for a misspelt key of Weir's; None if there is none."""
    return next(_slips(xargs or {}, body or {}), None)


def _misplaced(xargs: Mapping[str, Any], body: Mapping[str, Any]) -> Iterator[WeirError]:
    for key in LENS_KEYS:
        if body.get(key) is not None:
            yield WeirError('belongs in "vllm_xargs" or "extra_args"', key)
    if body.get("capture_wait") is True:
        yield WeirError(FORK_REFUSED["capture_wait"], "capture_wait")
    if body.get("conversation_id") is not None and fork_fields(body):
        yield WeirError(FORK_REFUSED["conversation_id"], "conversation_id")
    extra_args, extra_body = body.get("extra_args"), body.get("extra_body")
    for name, place in (("vllm_xargs", xargs), ("extra_args", extra_args)):
        for key in fork_fields(place if isinstance(place, Mapping) else None):
            yield WeirError("belongs in the body itself", f"{name}.{key}")
    if isinstance(extra_body, Mapping):
        for key in (*KEYS, *FORK_FIELDS, *FORK_LISTS):
            if extra_body.get(key) is not None and (key not in FORK_LISTS or key in fork_fields(extra_body)):
                yield WeirError(
                    "extra_body is an argument of OpenAI's client and no field of the body; put the key in the body "
                    "itself",
                    f"extra_body.{key}",
                )
    yield from _slips(xargs, body)


def _slips(xargs: Mapping[str, Any], body: Mapping[str, Any]) -> Iterator[WeirError]:
    places = ((xargs, False), (body, True), (body.get("extra_args"), False), (body.get("extra_body"), True))
    for place, in_body in places:
        for key, value in place.items() if isinstance(place, Mapping) else ():
            if value is not None and (error := _slip(key, value, in_body)) is not None:
                yield error


def _slip(key: Any, value: Any, in_body: bool = False) -> WeirError | None:
    """Return the error for one key; None if it is right, or none of Weir's."""
    if not isinstance(key, str):
        return None
    # Numbers and flags of that name are somebody else's.
    if key in _INNER_KEYS and not isinstance(value, (bool, int, float)):
        name = _INNER_KEYS[key]
        return WeirError(
            f'belongs inside the key {WIRE_KEY!r}: {{"weir": {{"v": 1, "{name}": [...]}}}}, which offline '
            f"weir.params({name}=...) writes",
            key,
        )
    right = meant(key, in_body)
    return None if right is None else WeirError(f"unknown to Weir and vLLM; did you mean {right!r}?", key)


def _fork_field_offline(key: str) -> WeirError:
    instead = f"did you mean {LENS_STEER_KEY!r}? " if key == "steering_vectors" else ""
    return WeirError(
        f"{instead}{key} is a field of a server's request body; offline use weir.params(interventions=...), which "
        "weir.from_tiers can make of such fields",
        key,
    )


_PUNCTUATION = str.maketrans("", "", "_-. \t")


def _letters(key: str) -> str:
    """Return a key in small letters, without punctuation."""
    return key.lower().translate(_PUNCTUATION)


def _swapped_or_doubled(a: str, b: str) -> bool:
    """Return whether `a` is `b` with two neighbouring letters swapped, or one written twice."""
    i = _differ_at(a, b)
    if len(a) == len(b):
        return a[i + 2 :] == b[i + 2 :] and a[i : i + 2] == b[i : i + 2][::-1]
    return len(a) == len(b) + 1 and i > 0 and a[i] == a[i - 1] and a[i + 1 :] == b[i:]


def _one_letter_off(a: str, b: str) -> bool:
    """Return whether one letter was left out, added or changed."""
    i = _differ_at(a, b)
    return a[i + 1 :] == b[i + 1 :] or a[i + 1 :] == b[i:] or a[i:] == b[i + 1 :]


def _differ_at(a: str, b: str) -> int:
    """Return how many first letters they share."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


_LETTERS = {own: _letters(own) for own in (WIRE_KEY, *FORK_FIELDS, *LENS_KEYS)}


def _by_end() -> dict[str, list[str]]:
    """Return Weir's keys by the first and the last two letters that a misspelt one may have.

    A slip changes one end at most, except in the four letters of `WIRE_KEY`, of which every slip is listed.
    """
    found: dict[str, list[str]] = {}
    for own, letters in _LETTERS.items():
        ends = {letters[:2], letters[-2:]}
        if own == WIRE_KEY:
            ends |= {letters[i : i + 2][::-1] for i in range(3)} | {letters[:1] + letters[2:3]}
        for end in ends:
            found.setdefault(end, []).append(own)
    return found


_BY_END = _by_end()
