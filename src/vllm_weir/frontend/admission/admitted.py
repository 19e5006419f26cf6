"""`AdmittedRequest`, a request checked and resolved; what of it depends on the length of its prompt."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.capture_groups import CaptureGroup
from vllm_weir.frontend.admission.lowering import AdmittedIntervention
from vllm_weir.frontend.admission.registries import RegisteredProbe
from vllm_weir.schema.engine_spec import EngineSpec
from vllm_weir.schema.engine_traits import EngineTraits
from vllm_weir.schema.functions import Travelling
from vllm_weir.schema.gates import StopRule
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import ResolvedIntervention
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.read_outs import FEATURES, LENS
from vllm_weir.schema.replay import ReplayRows
from vllm_weir.schema.request import ResolvedSpec, selected
from vllm_weir.schema.resolved_probes import CellLayout, ResolvedGate, ResolvedProbe
from vllm_weir.schema.rows import RowShard, ShardWidths, ring_rows
from vllm_weir.schema.selectors import Asked
from vllm_weir.schema.taps import STAGES, column_of, shard_column

ONE_ROW = ShardWidths({}, {}, 0)


@dataclass(frozen=True)
class AdmittedRequest:
    """A request that may enter the engine.

    Attributes:
        spec: its captures, resolved.
        parts: its captures by where their rows go; the first is what comes back on the output.
        interventions: its interventions, in order, and what each has become.
        rows: the vectors that these and the probes use, and the directions that captures project
            on, by digest.
        asked: the request's own selectors that may select nothing, depending on its lengths.
        widths: of the parts in which its rows come.
        probes: what scores its rows.
        gates: what decides on interventions.
        stops: what ends generation.
        told: how many of `probes`, from the first, come back on its outputs.
        counted: the probes that score every request, each with its index among `probes`.
        dose: whether the relative doses of its interventions are measured.
        functions: those that workers call for it, which keeps them in this process.
        replay: the experts that routers are made to choose; None if there are none.
    """

    spec: ResolvedSpec
    parts: tuple[CaptureGroup, ...]
    dtype: str
    interventions: tuple[AdmittedIntervention, ...] = ()
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    asked: Asked = ()
    widths: ShardWidths = ONE_ROW
    num_layers: int = 0
    probes: tuple[ResolvedProbe, ...] = ()
    gates: tuple[ResolvedGate, ...] = ()
    stops: tuple[StopRule, ...] = ()
    told: int = 0
    counted: tuple[tuple[int, RegisteredProbe], ...] = ()
    dose: bool = False
    functions: tuple[Travelling, ...] = ()
    replay: ReplayRows | None = None

    @property
    def sends_rows(self) -> bool:
        """Whether workers that read something off its rows send these, too."""
        return self.spec.postprocess is not None and self.spec.postprocess.with_rows

    @property
    def cells(self) -> CellLayout:
        return self.engine_spec.layout

    @functools.cached_property
    def by_position(self) -> tuple[AdmittedIntervention, ...]:
        """The interventions with rows that are for one selected position each."""
        return tuple(one for one in self.interventions if one.by_position)

    @functools.cached_property
    def calls(self) -> dict[str, bytes]:
        """What workers are told of the functions that they call for it, by key."""
        return {key: call for one in self.interventions for key, call in one.calls.items()}

    @functools.cached_property
    def columns(self) -> dict[Site | RowShard, int]:
        """The column of the plan in which workers record each site, and what they call each part's."""
        columns: dict[Site | RowShard, int] = {}
        for site, _, before, _ in self.spec.site_requests:
            column = columns[site] = column_of(site, before)
            if site in self.widths:
                for part, _ in self.widths.shards(site):
                    columns[part] = shard_column(column, part.shard, self.num_layers)
        return columns

    @functools.cached_property
    def shard_widths(self) -> dict[Site | RowShard, int]:
        sites = {request.site for request in self.spec.site_requests if request.site in self.widths}
        return {part: width for site in sites for part, width in self.widths.shards(site)}

    @functools.cached_property
    def _grouped(self) -> dict[int, tuple[int, ...]]:
        groups = [sites for part in self.parts for sites, _ in part.spec.by_positions]
        return {id(sites): tuple(map(self.columns.__getitem__, sites)) for sites in groups}

    def columns_of(self, sites: Sequence[Site | RowShard]) -> tuple[int, ...]:
        return self._grouped.get(id(sites)) or tuple(map(self.columns.__getitem__, sites))

    @functools.cached_property
    def effective(self) -> list[ResolvedIntervention]:
        """The interventions that change something, in order."""
        return [move for one in self.interventions for move in one.moves]

    @functools.cached_property
    def shared(self) -> frozenset[Site]:
        """Sites whose rows come back on the output and go elsewhere as well."""
        memory, *others = (part.spec.sites for part in self.parts)
        return frozenset(memory).intersection(itertools.chain.from_iterable(others))

    @functools.cached_property
    def engine_spec(self) -> EngineSpec:
        replayed = () if self.replay is None else (self.replay.start, self.replay.stop)
        return EngineSpec(self.spec, tuple(self.effective), self.probes, self.gates, self.dose, replayed)

    @property
    def wire(self) -> bytes:
        return self.engine_spec.wire

    @property
    def steps(self) -> tuple[ResolvedIntervention, ...]:
        return self.engine_spec.steps

    @functools.cached_property
    def max_rows_per_tap(self) -> int:
        """The most rows of the ring that one token takes at one tap."""
        rows: Counter[int] = Counter()
        for site, count in {request.site: request.ring_rows for request in self.spec.site_requests}.items():
            rows[self.columns[site] // STAGES] += count
        return max(rows.values(), default=0)

    @functools.cached_property
    def one_program_needs(self) -> tuple[int, int] | None:
        """(programs, instructions) if all positions that need one share one program, else None."""
        moves, instructions = self.steps, 0
        for m in moves:
            if m.per_position or m.positions.needs_token_ids or m.positions != moves[0].positions:
                return None
            instructions += len(m.layers) * (len(m.instructions) + bool(m.dose_cell))
        return 1, instructions

    @functools.cached_property
    def digests(self) -> list[str]:
        """Digests of the vectors that its interventions and probes use, sorted.

        Directions of captures are not in the table.
        """
        used = [move.vectors for move in self.effective] + [probe.vectors for probe in self.probes]
        return sorted(frozenset().union(*used))


def check_drafts_ahead(admitted: AdmittedRequest, prompt_len: int, traits: EngineTraits) -> None:
    """Raise WeirError if what is done to a token needs both its position and its id, which only the device knows."""
    if not traits.uncertainty:
        return
    selectors = {step.positions for step in admitted.steps}
    if not any(selector.needs_token_ids for selector in selectors):
        return
    steady = [selector.steady(prompt_len) for selector in selectors]
    if any(step.per_position for step in admitted.steps) or any(one is None or one[0] > prompt_len for one in steady):
        raise WeirError(
            "beside a selector by token, selectors that end or begin among the generated tokens cannot be told apart "
            "while drafts are verified: use 'all', 'prompt' or 'generated' beside it, or start the engine with "
            "async_scheduling=False",
            "interventions" if admitted.effective else "probes",
        )


NUMBERS_PER_ROW = 16
"""Numbers of scores, features and lenses that an output may have where it may have one row."""


_Bounded = tuple[int, Sequence[Positions], str]
"""(how much an output has at each position that any of these selectors chooses, the selectors, field that asks)."""


def check_rows(admitted: AdmittedRequest, prompt_len: int, generated: int, d_model: int, max_rows: int) -> None:
    """Raise WeirError if the output can have more than `max_rows` rows, or too many other numbers for so many.

    A row of a derived point counts as as many rows of `d_model` values as it fills.
    """
    part, positions = admitted.parts[0], prompt_len + generated - 1
    numbers: list[_Bounded] = [(probe.outputs, (probe.positions,), "probes") for probe in admitted.probes]
    rows: list[_Bounded] = [
        (ring_rows(recipe.width(positions), d_model), recipe.positions, "capture") for recipe in part.recipes
    ]
    if part.routed is not None:
        requests = part.routed.group.spec.site_requests
        rows += [(one.ring_rows, (one.positions,), "routing") for one in requests]
    for sites, selectors, how in part.groups:
        if how is None or how.reduce is None:
            rows.append((len(sites), selectors, "capture"))
            if how is not None and how.directions:
                numbers.append((len(sites) * len(how.directions), selectors, "capture"))
    for one in part.read_outs:  # each value has an id
        field = LENS if one.read_out.kind == LENS else FEATURES
        numbers.append((2 * one.read_out.width, (one.positions,), field))
    _check(rows, prompt_len, positions, max_rows, "rows", "(WEIR_SERVE_ROWS)")
    most, per_row = NUMBERS_PER_ROW * max_rows, f"({NUMBERS_PER_ROW} for each of WEIR_SERVE_ROWS)"
    _check(numbers, prompt_len, positions, most, "numbers", per_row)


def _check(asked: Sequence[_Bounded], prompt_len: int, positions: int, most: int, what: str, limit: str) -> None:
    """Raise WeirError, naming the field that asks for most, if more than `most` can be selected in all."""
    if sum(weight for weight, *_ in asked) * positions <= most:
        return
    counts = [weight * _count(selectors, prompt_len, positions) for weight, selectors, _ in asked]
    if sum(counts) > most:
        raise WeirError(
            f"up to {sum(counts)} {what} would come back, the server allows {most} {limit}; ask for fewer blocks, "
            "positions or values of each, reduce them, name a sink, or lower max_tokens",
            asked[counts.index(max(counts))][-1],
        )


def _count(selectors: Sequence[Positions], prompt_len: int, positions: int) -> int:
    """Return how many of the first positions are selected, at most: generated tokens are not known yet."""
    if any(selector.needs_token_ids for selector in selectors):
        return positions
    return len(selected(selectors, prompt_len, np.full(positions, -1)))


warming: ContextVar[bool] = ContextVar("weir_warming", default=False)
"""Whether requests that enter the engine only warm it up: nothing of them is counted, or goes to sinks."""
SHORTEST = 4
"""Tokens of the shortest prompt: with what is generated, a block of the KV cache is not full."""
EACH_UP_TO = 64
"""Lengths of prompts that are tried one by one; longer ones are powers of two."""


@contextmanager
def warming_up() -> Iterator[None]:
    """While this holds, requests of this task only warm the engine up."""
    token = warming.set(True)
    try:
        yield
    finally:
        warming.reset(token)


def prompt_lengths(admitted: AdmittedRequest, max_tokens: int, longest: int, largest_graph: int) -> list[int]:
    """Return how many tokens the prompts of a warm-up have: few, and more than a CUDA graph takes, if there are any.

    The first is the shortest prompt with which every position that the request asks for is reached. If none
    of up to `longest` tokens is enough, it is `SHORTEST`, with which the request is refused. The second is
    left out if positions do not let the prompt be so long.
    """
    lengths = {*range(SHORTEST, EACH_UP_TO), *(2**k for k in range(longest.bit_length())), longest}
    lengths |= {rows for one in admitted.by_position for rows in one.by_position}
    tried = (length for length in sorted(lengths) if SHORTEST <= length <= longest)
    shortest = next((length for length in tried if _fits(admitted, length, max_tokens)), min(SHORTEST, longest))
    eager = min(largest_graph + 1, longest)
    if largest_graph and eager > shortest and _fits(admitted, eager, max_tokens):
        return [shortest, eager]
    return [shortest]


def _fits(admitted: AdmittedRequest, length: int, max_tokens: int) -> bool:
    end = length + max_tokens - 1
    reached = all(positions.reaches(length, end) for positions, _ in admitted.asked)
    return reached and all(_has_row_each(one, length) for one in admitted.by_position)


def _has_row_each(one: AdmittedIntervention, length: int) -> bool:
    try:
        one.check_rows(length)
    except WeirError:
        return False
    return True
