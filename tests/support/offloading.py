"""vLLM's OffloadingConnector, also on a CPU: there its own scheduler and manager have a worker of ours.

vLLM's worker copies between a GPU and the host only.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

CONFIG = {"cpu_bytes_to_use": 64 << 20, "offload_prompt_only": False}
"""Of the connector."""
if torch.version.cuda is None:
    CONFIG |= {"spec_name": "HostSpec", "spec_module_path": "tests.support.offloading"}
BOUNDED = "max_load_tokens" in getattr(RequestOffloadState, "__annotations__", {})
"""Whether this vLLM's connector can be asked for less than it has."""


def aborts() -> str | None:
    """Need (`machine.needs`) an OffloadingConnector whose own assertion holds after requests were aborted."""
    return None if BOUNDED or torch.version.cuda is None else "stock vLLM 0.26 fails here on a GPU as well"


def failed_loads() -> str | None:
    """Need a runner that does not decode from blocks whose load was reported as failed, as stock vLLM's V2 does."""
    return None if torch.version.cuda is None else "stock vLLM decodes from such blocks on a GPU"


class HostSpec(CPUOffloadingSpec):
    """A `CPUOffloadingSpec` whose worker copies from the host to the host."""

    def get_worker(self, kv_caches: Any) -> Any:
        if self._worker is None:
            assert self.blocks_per_chunk == 1, "chunks are blocks"
            self._worker = HostWorker(kv_caches, self.num_chunks)
        return self._worker


class HostWorker(OffloadingWorker):
    """Copies blocks when asked to, and says so `delay` steps later; the copies of a load are made then, too."""

    delay = 2

    def __init__(self, kv_caches: Any, num_chunks: int) -> None:
        self.caches = [one.tensor.view(torch.int8).view(-1, one.page_size_bytes) for one in kv_caches.tensors]
        self.kept = [torch.zeros(num_chunks, cache.shape[1], dtype=torch.int8) for cache in self.caches]
        self.jobs: list[list[Any]] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for cache, kept in zip(self.caches, self.kept, strict=True):
            kept[torch.as_tensor(dst_spec.block_ids)] = cache[torch.as_tensor(src_spec.block_ids)]
        self.jobs.append([self.delay, job_id, None, None])
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self.jobs.append([self.delay, job_id, torch.as_tensor(src_spec.block_ids), torch.as_tensor(dst_spec.block_ids)])
        return True

    def get_finished(self) -> list[Any]:
        for job in self.jobs:
            job[0] -= 1
        done = [job for job in self.jobs if job[0] <= 0]
        self.jobs = [job for job in self.jobs if job[0] > 0]
        for _, _, source, target in done:
            if source is not None:
                for cache, kept in zip(self.caches, self.kept, strict=True):
                    cache[target] = kept[source]
        return [TransferResult(job_id=job[1], success=True) for job in done]

    def wait(self, job_ids: set[int]) -> None:
        """Stores are made when they are submitted, so there is nothing to wait for."""


def device_caches(worker: Any) -> list[torch.Tensor]:
    """The KV cache that a worker copies from and to: int8 [blocks, bytes of a block] of each layer."""
    return worker.caches if isinstance(worker, HostWorker) else worker._load_handler.dst_tensors
