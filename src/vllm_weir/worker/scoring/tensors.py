"""The device tensors of the score kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

RUN_FIELDS = ("probe", "token", "count", "fresh")
"""Fields of a run on the device, as in `vllm_weir.worker.planning.columns.RUN`."""


@dataclass(frozen=True)
class ScoreTensors:
    """What the score kernels of one worker read and write.

    Attributes:
        offsets: int32 [taps + 1]; the runs at tap t are those from ``offsets[t]`` to
            ``offsets[t + 1]`` (not included).
        runs: int32 [probes, 4], see RUN_FIELDS.
        plan, heads, ints, vectors, cells: as in `vllm_weir.worker.tap.op.TapTensors`.
        probes: int32 [probes, 15]. This and the following are the tables of
            `vllm_weir.worker.scoring.probe_table.ProbeTable`.
        decays: float32 [probes].
        gates: int32 [gates, 5].
        bounds: float32 [gates, 2].
        outs: int32 [copies * states + 1].
        biases: float32 [copies * states + 1].
        states: float32 [copies * states + 1], what is kept from step to step. A probe's numbers are in the
            order of `ResolvedProbe.state_size`; a gate's is its last factor.
        positions: int32 [tokens], of the step's tokens; only read where there are several copies of
            what is kept.
        copies: of what is kept of a request, see `vllm_weir.worker.scoring.probe_table`.
    """

    offsets: torch.Tensor
    runs: torch.Tensor
    plan: torch.Tensor
    heads: torch.Tensor
    ints: torch.Tensor
    vectors: torch.Tensor
    cells: torch.Tensor
    probes: torch.Tensor
    decays: torch.Tensor
    gates: torch.Tensor
    bounds: torch.Tensor
    outs: torch.Tensor
    biases: torch.Tensor
    states: torch.Tensor
    positions: torch.Tensor
    copies: int = 1
