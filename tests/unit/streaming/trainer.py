"""A trainer in a process of its own: sums what it reads, and stores a checkpoint of cursor and sums every few batches.

python trainer.py ADDRESS TOKEN CHECKPOINT EVERY SLEEP
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from vllm_weir.streaming.dataset import StreamedRows


def main(address: str, token: str, checkpoint: Path, every: int, sleep: float) -> None:
    state = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"cursor": None, "requests": {}, "sum": 0.0}
    rows = StreamedRows(address, token, state["cursor"], checkpoints=True)
    for n, batch in enumerate(rows):
        for request, token_id in zip(batch.requests.tolist(), batch.token_ids.tolist(), strict=True):
            state["requests"].setdefault(str(request), []).append(token_id)
        (values,) = batch.rows.values()
        state["sum"] += float(values.double().sum())
        state["cursor"] = batch.cursor
        if n % every == 0:
            store(checkpoint, state)
            rows.acknowledge(batch.cursor)
        time.sleep(sleep)
    store(checkpoint, {**state, "whole": True})
    rows.acknowledge(state["cursor"])


def store(checkpoint: Path, state: dict) -> None:
    new = checkpoint.with_suffix(".new")
    new.write_text(json.dumps(state))
    new.replace(checkpoint)


if __name__ == "__main__":
    address, token, checkpoint, every, sleep = sys.argv[1:]
    main(address, token, Path(checkpoint), int(every), float(sleep))
