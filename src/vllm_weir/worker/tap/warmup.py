"""Compilation of the taps' kernels, by a thread, while the model is loaded and traced."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from vllm_weir.schema.engine_traits import TableSizes
from vllm_weir.util.top import top_logprobs
from vllm_weir.worker.planning.columns import JOIN_FIELDS
from vllm_weir.worker.scoring.probe_table import ProbeTable
from vllm_weir.worker.scoring.scorer import Scorer
from vllm_weir.worker.scoring.tensors import ScoreTensors
from vllm_weir.worker.steering.programs import ProgramTable
from vllm_weir.worker.tap.device_tables import TableWriter
from vllm_weir.worker.tap.op import TapTensors, numbered


class TapWarmup:
    """Compiles the kernels that live steps launch; on a CPU there is nothing to do.

    Args:
        widths: of the rows of its hook points, besides `d_model`.
        cells: of each token, for the kernel that computes scores; 0 if probes are not served.
        copies: see `vllm_weir.worker.scoring.probe_table`.
    """

    def __init__(
        self,
        d_model: int,
        dtype: torch.dtype,
        device: torch.device,
        widths: Iterable[int] = (),
        cells: int = 0,
        copies: int = 1,
    ) -> None:
        self._d_model, self._dtype, self._device = d_model, dtype, device
        self._cells, self._copies = cells, copies
        self._done: list[Future[None]] = []
        self.add(widths)

    def add(self, widths: Iterable[int], vocabulary: int = 0) -> None:
        """Compile kernels for rows of these widths, too, and for lenses with so many logits."""
        if self._device.type == "cuda":
            thread = ThreadPoolExecutor(1, thread_name_prefix="weir-warm")
            scores = self._cells, self._copies
            self._done.append(thread.submit(_launch, self._d_model, self._dtype, self._device, widths, *scores))
            if vocabulary:
                self._done.append(thread.submit(_launch_lens, vocabulary, self._dtype, self._device))
            thread.shutdown(wait=False)

    def wait(self) -> None:
        """Return once the kernels are compiled. No kernel may be loaded while a CUDA graph is captured."""
        for done in self._done:
            done.result()


def _launch(
    d_model: int, dtype: torch.dtype, device: torch.device, widths: Iterable[int], cells: int, copies: int
) -> None:
    from vllm_weir.worker.scoring.triton_kernel import launch as score
    from vllm_weir.worker.tap.reduction_kernel import join
    from vllm_weir.worker.tap.triton_kernel import launch

    torch.cuda.set_device(device)
    first_token = torch.zeros(1, dtype=torch.int32, device=device)
    for arguments in stand_ins(d_model, dtype, device, widths):
        for listed in (None, first_token):
            launch(*arguments, listed=listed)
            launch(*arguments, listed=listed, groups=False)
            launch(*arguments[:-1], listed=listed, groups=False)
    # One reduction without columns.
    work = torch.zeros(1, len(JOIN_FIELDS), dtype=torch.int32, device=device)
    join(work, 1, *torch.zeros(2, 1, d_model, dtype=torch.float32, device=device))
    if cells:
        score(0, score_stand_in(d_model, cells, device, copies))
    torch.cuda.current_stream().synchronize()


def _launch_lens(vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.cuda.set_device(device)
    top_logprobs(torch.zeros(1, vocabulary, dtype=dtype, device=device), 1)
    torch.cuda.current_stream().synchronize()


def score_stand_in(d_model: int, cells: int, device: torch.device, copies: int = 1) -> ScoreTensors:
    """Return what the score kernel is given in a step without runs."""
    sizes = TableSizes(vectors=1, programs=1, nodes=1, probes=1, gates=1, states=1, cells=cells)
    programs = ProgramTable(sizes, 1, (), d_model)
    tables = TableWriter(programs, device).tensors
    none = torch.full((1, 4), -1, dtype=torch.int32, device=device)
    numbers = torch.zeros(1, cells, dtype=torch.float32, device=device)
    tensors = TapTensors(none, none, tables["vectors"], **tables, cells=numbers)
    return Scorer(ProbeTable(sizes, programs, copies), tensors, sizes).tensors


def stand_ins(
    d_model: int, dtype: torch.dtype, device: torch.device, widths: Iterable[int] = ()
) -> list[tuple[Any, ...]]:
    """Return arguments of `launch` for one token that does nothing; the last one, `cells`, may be left out.

    Rows of `d_model` are without and with a residual. Of the other widths there is one for each
    kernel that they take. Every dtype is given: vLLM changes torch's default dtype for all threads
    while it loads a model.
    """
    hidden, residual, ring = torch.zeros(3, 1, d_model, dtype=dtype, device=device)
    none = torch.full((1, 4), -1, dtype=torch.int32, device=device)
    floats = torch.zeros(1, d_model, dtype=torch.float32, device=device)
    tables = (numbered(0, device=device), none, none, ring, none, none, floats, floats, floats)
    # A kernel is compiled for a power of two, and for whether 16 divides the width.
    others = {((width - 1).bit_length(), width % 16 == 0): width for width in widths if width != d_model}
    rows = [torch.zeros(1, width, dtype=dtype, device=device) for width in others.values()]
    return [
        (row, other, *tables) for row, other in ((hidden, None), (hidden, residual), *((row, None) for row in rows))
    ]
