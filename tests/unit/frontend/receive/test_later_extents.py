"""Rows of a sequence whose first extent is gone: ranks count from the sequence's beginning."""

from __future__ import annotations

import numpy as np
import torch

from vllm_weir import messages
from vllm_weir.frontend.receive.row_sequence_view import Extent, RowSequenceView


def test_a_run_of_rows_in_an_extent_that_begins_later():
    view = RowSequenceView(messages.SequenceOpened(0, "r", [3]), None, 2, torch.float32)
    rows = torch.arange(10.0).view(5, 1, 2)
    view.extents = [Extent(4, rows)]
    assert torch.equal(view.gather_run(5, 2, "rows"), rows[1:3])
    assert torch.equal(view.gather(np.array([5, 6]), "rows"), rows[1:3])
