"""The form in which an admitted request travels to scheduler and workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admit import AdmittedRequest
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.schema.instructions import ResolvedIntervention
from vllm_weir.schema.reductions import GROUP
from vllm_weir.schema.selectors import Selectors
from vllm_weir.schema.table_sizes import TableSizes

MAX_TOKEN_SELECTORS = 4


def engine_form(
    admitted: AdmittedRequest,
    reply: str,
    prompt_ids: Sequence[int] | None,
    prompt_len: int,
    max_tokens: int,
    capabilities: EngineCapabilities,
    chunked: bool,
    sizes: TableSizes,
) -> dict[str, Any] | None:
    """What travels with the request to scheduler and workers; None if it asks for nothing that needs them.

    ``spec``: an `EngineSpec`. ``reply``: where its reader listens. ``first``: its first wanted position, or None.
    ``width``: the most rows that one of its tokens can give, 0 if it captures nothing. ``tall``: the most that it can
    give at one tap. ``few``: how many tokens give rows that leave the device, None if that is not bounded. ``cell``:
    ring rows of a group of tokens whose rows are reduced, 0 if none are. ``last``: the last of these tokens. ``most``:
    tokens that it can generate. ``needs``: what its interventions need of the tables, [vector digests, programs,
    instructions], None if there are none. The engine frontend adds ``rows``, the vectors that travel along, if there
    are any, and once a request has failed ``salt``, see `RowStore.salt`; and ``core``, why the engine core does not
    do its part, which the core takes back if it does.
    """
    moves = admitted.effective
    if not admitted.spec.site_requests and not moves:
        return None
    spec = admitted.spec
    cell, width = spec.cell(capabilities.d_model, capabilities.itemsize), spec.width
    last = spec.last(prompt_len, prompt_ids) if cell else None
    few = spec.tokens(prompt_len)
    tokens = 1 if chunked else prompt_len
    need = width * (tokens if few is None else min(few, tokens))
    if last is not None:
        need += cell * (1 if chunked else -(-prompt_len // GROUP))
    if need > capabilities.ring_rows:
        raise WeirError(
            f"this capture needs {need} rows in one step, the buffer holds "
            f"{capabilities.ring_rows}; raise the setting buffer_bytes",
            "capture",
        )
    return {
        "spec": admitted.wire,
        "reply": reply,
        "first": spec.first(prompt_len, prompt_ids),
        "width": width,
        "tall": admitted.tall,
        "few": few,
        "cell": 0 if last is None else cell,
        "last": last,
        "most": max_tokens,
        "needs": _needs(admitted, prompt_ids, prompt_len, max_tokens, sizes) if moves else None,
    }


def _needs(
    admitted: AdmittedRequest, prompt_ids: Sequence[int] | None, prompt_len: int, max_tokens: int, sizes: TableSizes
) -> list[Any]:
    """[vector digests, programs, instructions] that the request can come to hold; refused if it can never fit."""
    simple = admitted.simple_needs
    programs, nodes = _count_needs(admitted.effective, prompt_ids, prompt_len, max_tokens) if simple is None else simple
    needed = (
        ("vectors", len(admitted.digests), sizes.vectors, "vector_bytes"),
        ("programs", programs, sizes.programs, "max_programs"),
        ("instructions", nodes, sizes.nodes, "max_instructions"),
    )
    for name, need, capacity, setting in needed:
        if need > capacity:
            raise WeirError(
                f"needs {need} {name}, the engine's table holds {capacity}; raise the setting {setting}",
                "interventions",
            )
    return [admitted.digests, programs, nodes]


def _count_needs(
    moves: Sequence[ResolvedIntervention], prompt_ids: Sequence[int] | None, prompt_len: int, max_tokens: int
) -> tuple[int, int]:
    """(programs, instructions), an upper bound: one program for each combination that a position can have."""
    selectors = Selectors(list(dict.fromkeys(m.positions for m in moves)), prompt_len, prompt_ids)
    if len(selectors.by_token) > MAX_TOKEN_SELECTORS:
        raise WeirError(f"at most {MAX_TOKEN_SELECTORS} different selectors by token can steer", "interventions")
    every = np.unique(selectors.codes(np.arange(prompt_len + max_tokens)), return_counts=True)
    programs = nodes = 0
    for code, count in zip(*(array.tolist() for array in every), strict=True):
        active = [m for m in moves if code >> selectors.distinct.index(m.positions) & 1]
        if not active:
            continue
        times = 1 << sum(code >> bit & 1 for bit in selectors.by_token)
        ranked = [m for m in active if m.per_position]
        if ranked:
            times *= min(count, 1 + sum(len(m.instructions) for m in ranked))
        programs += times
        nodes += times * sum(len(m.layers) * (1 if m.per_position else len(m.instructions)) for m in active)
    return programs, nodes
