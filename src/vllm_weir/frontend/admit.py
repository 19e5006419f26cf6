"""Admission: a request's wish is checked against the engine before it enters, and put into the engine's wire form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.spec.hooks import Site
from vllm_weir.spec.lens import LENS_CAPTURE_KEY, LENS_STEER_KEY, lens_capture
from vllm_weir.spec.request import WIRE_KEY, RequestSpec, ResolvedSpec, Wish
from vllm_weir.worker.plan import tap_of

KEYS = (WIRE_KEY, LENS_CAPTURE_KEY, LENS_STEER_KEY)
"""Keys of ``SamplingParams.extra_args`` that are Weir's to honour or refuse."""


@dataclass(frozen=True)
class EngineFacts:
    """What the workers reported: which taps stand, and the model's measures."""

    taps: frozenset[int]
    num_layers: int
    d_model: int
    dtype: str
    ring_rows: int

    @classmethod
    def merge(cls, reports: Sequence[Mapping[str, Any]]) -> EngineFacts:
        """From every worker's report; raises WeirError with the first worker's reason if one is not served."""
        if not reports:
            raise WeirError("no worker answered; see `weir doctor`")
        for report in reports:
            if not report.get("ok"):
                raise WeirError(f"Weir is not working in this engine: {report.get('reason', 'unknown')}")
        first = reports[0]
        rows = [r["ring_rows"] for r in reports if r["ring_rows"] > 1]
        return cls(
            taps=frozenset(t for r in reports for t in r["taps"]),
            num_layers=first["num_layers"],
            d_model=first["d_model"],
            dtype=first["dtype"],
            ring_rows=min(rows, default=0),
        )


@dataclass(frozen=True)
class Admitted:
    """A request that may enter: its resolved spec, returned dtypes, and whether it came by vllm-lens's key."""

    spec: ResolvedSpec
    dtypes: dict[Site, str]
    lens_layers: tuple[int, ...]


def carries_keys(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether a request asks anything of Weir."""
    return extra_args is not None and any(extra_args.get(key) is not None for key in KEYS)


def admit(extra_args: Mapping[str, Any], facts: EngineFacts, has_token_ids: bool = True) -> Admitted:
    """Check and resolve a request's keys.

    Args:
        extra_args: ``SamplingParams.extra_args``; not changed.
        facts: the engine.
        has_token_ids: False for prompts given as embeddings.

    Raises:
        WeirError: naming the field, for anything that cannot be done exactly as asked.
    """
    spec = RequestSpec.parse(extra_args[WIRE_KEY]) if extra_args.get(WIRE_KEY) is not None else RequestSpec()
    lens_layers: tuple[int, ...] = ()
    captures = spec.capture
    if extra_args.get(LENS_CAPTURE_KEY) is not None:
        lens = lens_capture(extra_args[LENS_CAPTURE_KEY])
        if lens is not None:
            lens_layers = lens.resolve_layers(facts.num_layers)
            captures = (*captures, lens)
    if extra_args.get(LENS_STEER_KEY):
        raise WeirError("interventions are not available in this version", LENS_STEER_KEY)
    wishes: list[Wish] = []
    dtypes: dict[Site, str] = {}
    before: dict[Site, bool] = {}
    for capture in captures:
        if capture.positions.needs_token_ids and not has_token_ids:
            raise WeirError("the prompt is given as embeddings, so it has no token ids", f"{capture.path}.positions")
        for layer in capture.resolve_layers(facts.num_layers):
            site = Site(capture.hook, layer)
            _check_tapped(site, facts, capture.path)
            if before.setdefault(site, capture.before) != capture.before:
                raise WeirError(f"{site} is asked for both before and after interventions", f"{capture.path}.before")
            dtype = capture.dtype or facts.dtype
            if dtypes.setdefault(site, dtype) != dtype:
                raise WeirError(f"{site} is asked for in both {dtypes[site]} and {dtype}", f"{capture.path}.dtype")
            wishes.append(Wish(site, capture.positions, capture.before))
    return Admitted(ResolvedSpec(tuple(wishes)), dtypes, lens_layers)


def engine_form(
    admitted: Admitted, reply: str, prompt_len: int, prompt_ids: Sequence[int] | None, facts: EngineFacts, chunked: bool
) -> dict[str, Any]:
    """What travels with the request to scheduler and workers."""
    width = len({(w.site, w.before) for w in admitted.spec.wishes})
    if width > facts.ring_rows or (not chunked and width * prompt_len > facts.ring_rows):
        raise WeirError(
            f"this capture needs {width * (1 if chunked else prompt_len)} rows in one step, the buffer holds "
            f"{facts.ring_rows}; raise the setting buffer_bytes",
            "capture",
        )
    return {
        "wishes": admitted.spec.to_wire(),
        "reply": reply,
        "first": admitted.spec.first(prompt_len, prompt_ids),
        "width": width,
    }


def _check_tapped(site: Site, facts: EngineFacts, path: str) -> None:
    if site.hook not in ("resid_pre", "resid_post"):
        raise WeirError(f"{site.hook} is not tapped; resid_pre and resid_post are", f"{path}.hook")
    if tap_of(site) not in facts.taps:
        raise WeirError(
            f"{site} is not tapped by this engine; start it with a 'layers' / 'hooks' setting that includes it",
            f"{path}.layers",
        )
