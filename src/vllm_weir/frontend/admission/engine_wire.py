"""The `EngineRequest` of an admitted request, with bounds on the memory that it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admitted import AdmittedRequest
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.schema.engine_spec import EngineRequest, TableNeeds
from vllm_weir.schema.engine_traits import TableSizes
from vllm_weir.schema.instructions import ResolvedIntervention
from vllm_weir.schema.rows import GROUP, ring_rows
from vllm_weir.schema.selectors import Selectors
from vllm_weir.util.lru import LruCache

MAX_BYTES = 64 << 10
"""Bytes of vectors that travel with a request. If it has more, the workers ask for those that they
lack."""


class InlineVectors:
    """The vectors that one caller has sent to its engine recently, which need not be sent again.

    A guess: a worker asks for vectors that it has dropped.

    Args:
        table_bytes: bytes of the engine's table of vectors. Half of it may hold those of other
            callers.
    """

    def __init__(self, table_bytes: int) -> None:
        self._sent: LruCache[bool] = LruCache(table_bytes // 2)

    def of(self, admitted: AdmittedRequest) -> dict[str, bytes]:
        """Return the vectors that travel with a request: digest -> float32 bytes, little-endian."""
        unsent = [digest for digest in admitted.digests if not self._sent.get(digest)]
        # Directions are always sent: a worker drops them with the last request that projects on
        # them.
        postprocess = admitted.spec.postprocess
        directions = postprocess.directions if postprocess is not None else ()
        rows = {digest: admitted.rows[digest] for digest in (*unsent, *directions)}
        if sum(row.size for row in rows.values()) * 4 > MAX_BYTES:
            return {}
        for digest in unsent:
            self._sent.put(digest, True, rows[digest].size * 4)
        return {digest: row_bytes(row) for digest, row in rows.items()}


def row_bytes(row: np.ndarray) -> bytes:
    """Return a vector as float32 bytes, little-endian."""
    return np.ascontiguousarray(row, "<f4").tobytes()


MAX_TOKEN_SELECTORS = 4
"""Different selectors by token id that can steer and score one request: each doubles the programs
that it can need."""
NO_NEEDS = TableNeeds([], 0, 0)


def make_engine_request(
    admitted: AdmittedRequest,
    reader_endpoint: str,
    prompt_ids: Sequence[int] | None,
    prompt_len: int,
    max_tokens: int,
    capabilities: EngineCapabilities,
    step_tokens: int,
    sizes: TableSizes,
) -> EngineRequest | None:
    """Return what travels with a request to the scheduler and workers; None if it asks nothing of them.

    The engine frontend adds the vectors that travel along, and the cache salt. `prompt_ids` is None if (a
    part of) the prompt is given as embeddings; `step_tokens` is how many of its tokens one step has to
    hold: 1 if the engine splits prompts wherever it likes.

    Raises:
        WeirError: if the ring or the tables can never hold what the request needs.
    """
    if not admitted.spec.site_requests and not admitted.steps:
        return None
    request = EngineRequest(admitted.wire, reader_endpoint, max_row_tokens=0, max_tokens=max_tokens)
    if admitted.spec.site_requests:
        _bound_rows(request, admitted, prompt_ids, prompt_len, capabilities, step_tokens)
    request.calls = admitted.calls
    request.first_position = _first_position(admitted, prompt_len, prompt_ids)
    if admitted.steps:
        request.table_needs = _table_needs(admitted, prompt_ids, prompt_len, max_tokens, capabilities.d_model, sizes)
    if admitted.replay is not None:
        request.replay = admitted.replay.until(prompt_len + max_tokens)
        if request.replay is None:
            raise WeirError(
                f"the request has at most {prompt_len + max_tokens} positions, all of them before this one",
                "routing.start",
            )
        request.table_needs = request.table_needs or NO_NEEDS
    return request


def _bound_rows(
    request: EngineRequest,
    admitted: AdmittedRequest,
    prompt_ids: Sequence[int] | None,
    prompt_len: int,
    capabilities: EngineCapabilities,
    step_tokens: int,
) -> None:
    """Set how many rows the captures of a request can give; raise WeirError if the ring can never hold them."""
    spec = admitted.spec
    rows_per_group, rows_per_token = spec.cell(capabilities.d_model, capabilities.itemsize), spec.width
    last_reduced = spec.last(prompt_len, prompt_ids) if rows_per_group else None
    max_row_tokens = spec.tokens(prompt_len)
    if max_row_tokens is not None:  # a token whose position is not certain gives rows if any it may have is wanted
        max_row_tokens *= 1 + capabilities.traits.uncertainty
    needed_rows = rows_per_token * (step_tokens if max_row_tokens is None else min(max_row_tokens, step_tokens))
    if last_reduced is not None:
        begun = 1 < step_tokens < prompt_len  # a step may begin within a group
        needed_rows += rows_per_group * (-(-step_tokens // GROUP) + begun)
    if needed_rows > capabilities.ring_rows:
        raise WeirError(
            f"this capture needs {needed_rows} rows in one step, the buffer holds {capabilities.ring_rows}; "
            "capture fewer blocks or hook points, or raise the setting buffer_bytes",
            "capture",
        )
    request.rows_per_token, request.rows_per_tap = rows_per_token, admitted.max_rows_per_tap
    request.max_row_tokens = max_row_tokens
    request.rows_per_group, request.last_reduced = 0 if last_reduced is None else rows_per_group, last_reduced


def _first_position(admitted: AdmittedRequest, prompt_len: int, prompt_ids: Sequence[int] | None) -> int | None:
    """Return the first position that has to be computed for the request itself; None if none has."""
    if not admitted.spec.site_requests and not admitted.probes and not admitted.gates:
        return None
    firsts = [admitted.spec.first(prompt_len, prompt_ids)]
    firsts += [probe.positions.first(prompt_len, prompt_ids) for probe in admitted.probes]
    if any(gate.controller for gate in admitted.gates):
        firsts.append(prompt_len - 1)  # after whose pass a controller decides on the next token
    return min((first for first in firsts if first is not None), default=None)


def _table_needs(
    admitted: AdmittedRequest,
    prompt_ids: Sequence[int] | None,
    prompt_len: int,
    max_tokens: int,
    d_model: int,
    sizes: TableSizes,
) -> TableNeeds:
    """Bound what the request can come to hold of the tables; raise WeirError if it can never fit."""
    counts = admitted.one_program_needs
    if counts is None:
        counts = _count_programs(admitted.steps, prompt_ids, prompt_len, max_tokens)
    programs, instructions = counts
    digests, widths = admitted.digests, admitted.rows
    wide = {one: ring_rows(size, d_model) for one in digests if (size := widths[one].size) > d_model}
    rows = len(digests) - len(wide) + sum(wide.values())
    if rows > sizes.vectors or programs > sizes.programs or instructions > sizes.nodes:
        raise _too_many(admitted, wide, (rows, programs, instructions), sizes)
    states = _check_probes(admitted, sizes)
    return TableNeeds(digests, programs, instructions, wide, len(admitted.probes), len(admitted.gates), states)


def _too_many(
    admitted: AdmittedRequest, wide: Mapping[str, int], needs: tuple[int, int, int], sizes: TableSizes
) -> WeirError:
    """Return the error for a request that needs more (vectors, programs, instructions) than a table holds."""
    tables = (
        ("rows of vectors" if wide else "vectors", sizes.vectors, "vector_bytes"),
        ("programs", sizes.programs, "max_programs"),
        ("instructions", sizes.nodes, "max_instructions"),
    )
    need, (name, capacity, setting) = next(
        (need, table) for need, table in zip(needs, tables, strict=True) if need > table[1]
    )
    return WeirError(
        f"needs {need} {name}, the engine's table holds {capacity}; raise the setting {setting}",
        "interventions" if admitted.effective else "probes",
    )


def _check_probes(admitted: AdmittedRequest, sizes: TableSizes) -> int:
    """Return how many numbers the probes and gates keep; raise WeirError if the device can never hold them."""
    layout = admitted.cells
    if not layout.cells:  # there are neither probes nor gates
        return 0
    states = sum(probe.state_size for probe in admitted.probes) + len(admitted.gates)
    if layout.cells > sizes.cells and (doses := layout.reported - layout.doses):
        raise WeirError(
            f"measuring takes {doses} numbers for each token, one for each intervention at each block, and the engine "
            f"has room for {sizes.cells - (layout.cells - doses)}; steer fewer blocks, leave dose out, or raise the "
            "setting probe_cells",
            "dose",
        )
    for name, need, capacity, setting in (
        ("numbers for each token", admitted.cells.cells, sizes.cells, "probe_cells"),
        ("probes", len(admitted.probes), sizes.probes, "max_probes"),
        ("gates", len(admitted.gates), sizes.gates, "max_probes"),
        ("numbers from step to step", states, sizes.states, "max_probes"),
    ):
        if need > capacity:
            raise WeirError(
                f"needs {need} {name}, the engine has room for {capacity}; raise {setting}",
                "probes" if admitted.probes else "interventions",
            )
    return states


def _count_programs(
    interventions: Sequence[ResolvedIntervention], prompt_ids: Sequence[int] | None, prompt_len: int, max_tokens: int
) -> tuple[int, int]:
    """Return upper bounds on (programs, instructions).

    A program is one combination of interventions and scoring steps that a position can have. Positions are grouped by
    their code, whose bit k says whether distinct selector k can select them. A selector by token id
    may or may not select a token that is not known yet, so each one doubles the programs. An
    intervention with instructions for each position can give every position a program of its own.
    """
    selectors = Selectors(list(dict.fromkeys(m.positions for m in interventions)), prompt_len, prompt_ids)
    if len(selectors.by_token) > MAX_TOKEN_SELECTORS:
        raise WeirError(
            f"at most {MAX_TOKEN_SELECTORS} different selectors by token can steer and score a request", "interventions"
        )
    codes, counts = np.unique(selectors.codes(np.arange(prompt_len + max_tokens)), return_counts=True)
    programs = instructions = 0
    for code, positions in zip(codes.tolist(), counts.tolist(), strict=True):
        active = [m for m in interventions if code >> selectors.distinct.index(m.positions) & 1]
        if not active:
            continue
        variants = 1 << sum(code >> bit & 1 for bit in selectors.by_token)
        per_position = [m for m in active if m.per_position]
        if per_position:
            variants *= min(positions, 1 + sum(len(m.instructions) // m.per_position for m in per_position))
        programs += variants
        instructions += variants * sum(
            len(m.layers) * ((m.per_position or len(m.instructions)) + bool(m.dose_cell)) for m in active
        )
    return programs, instructions
