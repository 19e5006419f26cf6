"""What admission makes of a request."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_weir.frontend.admission.capture_groups import CaptureGroup
from vllm_weir.frontend.admission.lowering import AdmittedIntervention
from vllm_weir.frontend.admission.probe_registry import RegisteredProbe
from vllm_weir.schema.by_position import ByPosition
from vllm_weir.schema.engine_spec import EngineSpec
from vllm_weir.schema.functions import Travelling
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import ResolvedIntervention
from vllm_weir.schema.request import ResolvedSpec
from vllm_weir.schema.resolved_probes import CellLayout, ResolvedGate, ResolvedProbe
from vllm_weir.schema.row_shards import RowShard, ShardWidths
from vllm_weir.schema.selectors import Asked
from vllm_weir.schema.stop_rules import StopRule
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

    @property
    def sends_rows(self) -> bool:
        """Whether workers that read something off its rows send these, too."""
        return self.spec.postprocess is not None and self.spec.postprocess.with_rows

    @property
    def cells(self) -> CellLayout:
        return self.engine_spec.layout

    @functools.cached_property
    def by_position(self) -> tuple[ByPosition, ...]:
        """Rows that are for one selected position each, of all interventions, each once."""
        return tuple(dict.fromkeys(rows for one in self.interventions for rows in one.by_position))

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
        return EngineSpec(self.spec, tuple(self.effective), self.probes, self.gates, self.dose)

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
