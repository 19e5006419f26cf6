"""The driver's batched copies, on real memory: what `vllm_weir.worker.transfer.cuda_memcpy` tells it is what it
does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu
WIDTH = 192


@pytest.mark.parametrize("batched", [True, False])
def test_runs_and_pieces(batched, monkeypatch):
    """Rows go where they belong, and nothing else is written."""
    from vllm_weir.worker.transfer import copy_out, cuda_memcpy
    from vllm_weir.worker.transfer.pinned_buffer import HostBuffer
    from vllm_weir.worker.transfer.ring import Ring

    if batched:
        assert cuda_memcpy._copy_batch() is not None and cuda_memcpy._copy_batch_of_runs() is not None, (
            "this driver has no batched copies"
        )
    else:
        monkeypatch.setattr(cuda_memcpy, "_copy_batch", lambda: None)
        monkeypatch.setattr(cuda_memcpy, "_copy_batch_of_runs", lambda: None)
    torch.cuda.init()
    ring = Ring(1000, WIDTH, torch.bfloat16, torch.device("cuda", 0))
    ring.buffer.copy_(torch.randn(1000, WIDTH, generator=torch.Generator().manual_seed(1)))
    host = HostBuffer(400_000, WIDTH * 2, pin=True)  # three pinned blocks
    try:
        host.prepare(0, host.rows)
        rows = host.view(WIDTH, torch.bfloat16)
        rows.fill_(7)
        sender = copy_out.CudaCopyOut(ring, host)
        edge = host._block_rows
        runs = [(0, 10, 5, 7, 3), (7, 100, 32, 16, 1), (30, edge - 40, 38, 9, 4), (50, 300_000, 2, 5, 2)]
        rest = np.array([(500, 9, 1), (501, 2000, 40), (600, edge - 3, 6)], np.int64)
        torch.cuda.synchronize()
        sender.send_runs(200, 4, np.array(runs, np.int64))
        sender.send(rest)
        sender.stream.synchronize()
        wanted = torch.full_like(rows[: 2 * edge], 7)
        source = ring.buffer.cpu()
        for lane, row, step, count, width in runs:
            for k in range(count):
                at = 200 + 4 * (lane + k)
                wanted[row + k * step : row + k * step + width] = source[at : at + width]
        for slot, row, count in rest.tolist():
            wanted[row : row + count] = source[slot : slot + count]
        assert rows[: 2 * edge].equal(wanted)
        assert (rows[2 * edge :] == 7).all()
    finally:
        host.close()
