"""Records of a remote file: fetched in few ranges, handed out in the order that was asked for."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_weir.errors import StoreError
from vllm_weir.storage.record_blocks import MERGE_GAP, FileBlock

D = 4
HEADER = {"fields": [{"name": "values", "dtype": "float32", "shape": [D], "offset": 0}]}


class Remote(SimpleNamespace):
    """A store that hands out ranges of one file."""

    local = False

    def read_ranges(self, name, starts, ends):
        self.asked.append(list(zip(starts, ends, strict=True)))
        return [self.content[a:b].tobytes() for a, b in zip(starts, ends, strict=True)]

    def error(self, name, why):
        return StoreError(f"{name} {why}")


def test_records_come_in_the_order_asked_for():
    far = MERGE_GAP + 1000
    content = np.random.default_rng(0).integers(0, 256, far + 400, np.uint8)
    store = Remote(content=content, asked=[])
    block = FileBlock(store, "file", HEADER, len(content))
    width = block.width
    offsets = np.array([far, 0, far + 2 * width, width, 3 * width, 0])
    assert block.gather(offsets).tolist() == [content[at : at + width].tolist() for at in offsets]
    assert store.asked == [[(0, 4 * width), (far, far + 3 * width)]]
    store.content = content[: far + width]
    with pytest.raises(StoreError, match="truncated"):
        block.gather(offsets)
