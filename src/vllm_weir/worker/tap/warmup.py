"""The taps' kernels are compiled by a thread while the model is loaded and traced."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from vllm_weir.worker.planning.columns import JOIN_FIELDS
from vllm_weir.worker.tap.op import numbered


class TapWarmup:
    """Compiles what live steps launch: a few kernels, seconds each, most of them spent waiting for ptxas."""

    def __init__(self, d_model: int, dtype: torch.dtype, device: torch.device) -> None:
        self._done: Future[None] | None = None
        if device.type == "cuda":
            thread = ThreadPoolExecutor(1, thread_name_prefix="weir-warm")
            self._done = thread.submit(_launch, d_model, dtype, device)
            thread.shutdown(wait=False)

    def wait(self) -> None:
        """Return once the kernels are there: nothing may be loaded while a CUDA graph is captured."""
        if self._done is not None:
            self._done.result()


def _launch(d_model: int, dtype: torch.dtype, device: torch.device) -> None:
    from vllm_weir.worker.tap.reduction_kernel import join
    from vllm_weir.worker.tap.triton_kernel import launch

    torch.cuda.set_device(device)
    nobody = torch.zeros(1, dtype=torch.int32, device=device)
    for arguments in stand_ins(d_model, dtype, device):
        launch(*arguments)
        launch(*arguments, listed=nobody)
    work = torch.zeros(1, len(JOIN_FIELDS), dtype=torch.int32, device=device)  # a fold without columns
    join(work, 1, *torch.zeros(2, 1, d_model, dtype=torch.float32, device=device))
    torch.cuda.current_stream().synchronize()


def stand_ins(d_model: int, dtype: torch.dtype, device: torch.device) -> list[tuple[Any, ...]]:
    """The launcher's arguments for a token that no plan knows, with nothing and with something beside the stream.

    Nothing is left to torch's default dtype, which vLLM changes for all threads while it loads the model.
    """
    hidden, residual, ring = torch.zeros(3, 1, d_model, dtype=dtype, device=device)
    none = torch.full((1, 4), -1, dtype=torch.int32, device=device)
    floats = torch.zeros(1, d_model, dtype=torch.float32, device=device)
    number = numbered(0, device=device)
    return [(hidden, other, number, none, none, ring, none, none, floats, floats) for other in (None, residual)]
