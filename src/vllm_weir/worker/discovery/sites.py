"""The sites of a loaded model: where every hook point is, verified, or why it is refused.

Before a model is compiled, it runs a few times over a handful of tokens, and each pass is recorded
(`recorded_model`, `recorder`). `map_sites` then goes from recorded tensors to a `SiteMap`:

1. Baseline: record a pass with the model's own weights, with noise only where the dummy tokens
   leave nothing of use (`noise.mixer_noise`). Refuse models whose blocks run several times.
2. Stream: read off the baseline which tensors may carry the stream from block to block
   (`stream_ports`). There may be several choices.
3. Noise: record a pass in which noise enters every block and leaves every part of it (`noise`).
4. Resolve: for each choice, find the points in each block: those of one block of each type by
   matching equations (`matcher`, `candidates`, `resolve`), those of the other blocks of the type by
   copying them and checking the equation there (`block_types`). What a description of the model
   names is used instead (`descriptions`).
5. Choose: of the choices whose stream is all that the blocks pass on (`stream_check`), take the one
   with the most points.
6. Verify: check the points' identities in the baseline, and add vectors at every point in another
   pass to see that they arrive (`verification`, `boundary_sites`).
7. Parts: find and verify the points inside attention and MLP in two passes more (`parts.points`).

What remains are `anchors`, one per site; `worker.tap.install` puts taps there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_weir.schema.hooks import MODEL_HOOKS, PART_HOOKS, STREAM_HOOKS
from vllm_weir.worker.discovery.anchors import Trace
from vllm_weir.worker.discovery.block_stack import BlockPoints, ModelDescription, resolve_described_block
from vllm_weir.worker.discovery.block_types import BlockTypes
from vllm_weir.worker.discovery.module_tree import ModuleTree, Run
from vllm_weir.worker.discovery.parts.points import map_parts
from vllm_weir.worker.discovery.parts.recorder import PartModules
from vllm_weir.worker.discovery.recorded_model import NoiseLevel, RecordedModel, enter_noise, leave_noise, noise
from vllm_weir.worker.discovery.site_map import SiteMap
from vllm_weir.worker.discovery.stream_check import StreamCheck
from vllm_weir.worker.discovery.stream_ports import StreamPorts, stream_port_candidates
from vllm_weir.worker.discovery.verification import Verification


def map_sites(
    tree: ModuleTree, run: Run, dtype: torch.dtype, description: ModelDescription, parts: PartModules | None = None
) -> SiteMap:
    """Find and verify every site of a model; without `parts`, none inside attention and MLP."""
    sites = SiteMap(tree.num_layers)
    if not tree.blocks:
        return sites
    recorded = RecordedModel.start(tree, run, dtype)
    unfit = _why_unfit(recorded.baseline, tree)
    candidates = [] if unfit else stream_port_candidates(recorded.baseline, tree)
    if not candidates:
        reason = unfit or _why_no_stream(recorded.baseline, tree)
        inside = PART_HOOKS if parts else ()
        sites.refuse((*STREAM_HOOKS, *inside, *MODEL_HOOKS), range(tree.num_layers), reason)
        return sites
    search = _Search(recorded, candidates, description)
    solution, stream_failures = search.best()
    verification = Verification(
        recorded, solution.ports, solution.points, solution.noise_levels, search.noise_passes, sites
    )
    verification.fill(stream_failures)
    if parts is not None:
        map_parts(recorded, solution.ports, parts, sites)
    return sites


@dataclass(frozen=True)
class _Solution:
    """What was found with one choice of what carries the stream."""

    ports: StreamPorts
    points: dict[int, BlockPoints]
    noise_levels: dict[int, NoiseLevel]  # block -> level of the noise pass in which they were found

    @property
    def num_found(self) -> int:
        return sum(len(points.anchors) + points.explained for points in self.points.values())

    @property
    def fully_sequential(self) -> bool:
        """Whether all points of all blocks were found, which no other choice can surpass."""
        return all(points.complete and points.kind == "sequential" for points in self.points.values())


class _Search:
    """Steps 3 to 5: the points for each choice of what carries the stream, and the best choice.

    Args:
        candidates: what may carry the stream, likeliest first.

    Attributes:
        noise_passes: the recorded passes with noise, by level.
    """

    def __init__(self, recorded: RecordedModel, candidates: list[StreamPorts], description: ModelDescription) -> None:
        self._recorded, self._candidates, self._description = recorded, candidates, description
        self.noise_passes: dict[NoiseLevel, Trace] = {"children": self._record_noise("children")}

    def best(self) -> tuple[_Solution, dict[int, str]]:
        """Return the best solution, and block -> why its stream is not known after all.

        Solutions with more points come first. The first one whose stream passes the check is taken,
        or the very first if none does.
        """
        ranked: list[tuple[tuple[int, int], _Solution, dict[int, str] | None]] = []
        for ports in self._candidates:
            solution = self._solve(ports)
            on_blocks = self._anchors_on_blocks(solution)
            failures = None
            if solution.fully_sequential and not on_blocks:
                failures = self._stream_failures(ports)
            ranked.append(((solution.num_found, -on_blocks), solution, failures))
            if failures == {}:
                break
        ranked.sort(key=lambda entry: entry[0], reverse=True)
        checked: list[tuple[_Solution, dict[int, str]]] = []
        for _, solution, failures in ranked:
            checked.append((solution, self._stream_failures(solution.ports) if failures is None else failures))
            if not checked[-1][1]:
                return solution, self._why_undecided(solution)
        return checked[0]

    def _solve(self, ports: StreamPorts) -> _Solution:
        """Find the points with one choice; if some are missing, also with noise from the leaves."""
        solution = self._solve_with_recorded(ports)
        complete = all(points.complete for points in solution.points.values())
        if not complete and "leaves" not in self.noise_passes:
            self.noise_passes["leaves"] = self._record_noise("leaves")
            solution = self._solve_with_recorded(ports)
        return solution

    def _solve_with_recorded(self, ports: StreamPorts) -> _Solution:
        """Find the points of every block in the noise pass that shows most of them."""
        recorded, solution = self._recorded, _Solution(ports, {}, {})
        for level, trace in self.noise_passes.items():
            types = BlockTypes(ports, recorded.mixers, recorded.tree.only_scales, recorded.matcher)
            for block in recorded.tree.blocks:
                calls = trace.blocks[block]
                if self._description.points:
                    points = resolve_described_block(self._description, calls, ports, recorded.matcher)
                else:
                    points = types.points(calls)
                if block not in solution.points or len(points.anchors) > len(solution.points[block].anchors):
                    solution.points[block], solution.noise_levels[block] = points, level
        return solution

    def _record_noise(self, level: NoiseLevel) -> Trace:
        """Record a pass with noise at every block's entrance, and wherever a part of it ends."""
        recorded = self._recorded
        leave = leave_noise(recorded.tree, level, recorded.mixers)
        return recorded.record(enter_noise(self._candidates[0]), leave, offset_noise=noise)

    def _stream_failures(self, ports: StreamPorts) -> dict[int, str]:
        return StreamCheck(self._recorded, ports).failures()

    def _anchors_on_blocks(self, solution: _Solution) -> int:
        """Count the anchors on blocks as a whole.

        They are a sign of a wrong choice: if the stream is taken to have one tensor too many, the
        block's own result looks like an addition to it.
        """
        return sum(
            anchor.module == f"{self._recorded.tree.stack}.{block}"
            for block, points in solution.points.items()
            for anchor in points.anchors.values()
        )

    def _why_undecided(self, solution: _Solution) -> dict[int, str]:
        """Return block -> why its stream is not known, for the only block of a pipeline stage.

        If such a block passes on several tensors, only its points tell which are the stream.
        """
        block, *others = self._recorded.tree.blocks
        if others or block + 1 == self._recorded.tree.num_layers:
            return {}
        call, points = self._recorded.baseline.blocks[block][0], solution.points[block]
        ports = solution.ports.of(call)
        stream = {call.pointers.get(key) for key in (ports.hidden_out, ports.residual_out) if key}
        other_outputs = [key for key in call.outputs if call.pointers[key] not in stream]
        end_is_explained = points.explained and (points.kind != "sequential" or "mlp_out" in points.anchors)
        if not other_outputs or end_is_explained:
            return {}
        passed_on = f"block {block} hands on {len(call.outputs)} tensors"
        return {block: f"{passed_on}, and nothing in its pipeline stage tells which are the stream"}


def _why_unfit(baseline: Trace, tree: ModuleTree) -> str:
    """Return why a position has no row of its own in a model's blocks; "" if it has."""
    name = type(tree.model).__name__
    for block in tree.blocks:
        calls = [call for call in baseline.blocks[block] if call.local_path == ""]
        if len(calls) != 1:
            return f"block {block} of {name} runs {len(calls)} times in one pass, so a position has no single row there"
        # The Transformers backend carries a batch dimension of one.
        shapes = (calls[0].shapes[key] for key in calls[0].outputs)
        several = next((shape for shape in shapes if len(shape) > 2 and shape[:-2] != (1,)), None)
        if several is not None:
            streams = f"several streams at once {several}"
            return f"the blocks of {name} hand on {streams}, so a position has no single row there"
    return ""


def _why_no_stream(baseline: Trace, tree: ModuleTree) -> str:
    shapes = {str(key): shape for key, shape in baseline.blocks[min(tree.blocks)][0].shapes.items()}
    name = type(tree.model).__name__
    return f"the blocks of {name} do not hand on one stream of width {tree.width}: they are given {shapes}"
