"""``python read_pickled.py WHAT FILE ...``: outputs of vLLM, looked at where no engine runs. Imports nothing of Weir's.

WHAT is ``pickle``, or ``weir`` to import `vllm_weir` first. Prints what it found as JSON.
"""

from __future__ import annotations

import json
import pickle
import sys
from typing import Any


def look(outputs: list[Any]) -> list[Any]:
    """Of an output with rows and a plain one: what a reader sees of them."""
    found: list[Any] = []
    for out in outputs:
        for one in (out, out.outputs[0]):
            acts, receipt, scores = one.activations, one.receipt, one.scores
            if acts is None:
                found.append([None, receipt])
                continue
            rows = {str(site): acts[site].double().sum().item() for site in acts.sites}
            scored = {name: [scores[name].tolist(), scores.positions[name].tolist()] for name in scores}
            found.append([rows, acts.positions.tolist(), {str(s): n for s, n in receipt.captured.items()}, scored])
    return found


if __name__ == "__main__":
    what, *paths = sys.argv[1:]
    if what == "weir":
        import vllm_weir  # noqa: F401

        # Reading a file of rows needs neither.
        assert not {"torch", "vllm"} & set(sys.modules)
    seen = []
    for path in paths:
        with open(path, "rb") as file:
            seen.append(look(pickle.load(file)))  # noqa: S301 - of our own making
    print(json.dumps(seen))
