"""A consumer that notes the positions whose residual stream has an unusual norm."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_weir import Capture, WeirError
from vllm_weir.consumers import Consumer, EngineInfo, Finished, Rows


class NormWatch(Consumer):
    """Writes a line of JSON for each sequence with rows whose norm is more than `times` the median.

    Args:
        path: the file, appended to.
        times: how far above the median of the sequence's rows a norm is noted.
    """

    captures = (Capture("resid_post", layers=0),)

    def __init__(self, path: str = "norm_watch.jsonl", times: float = 3.0) -> None:
        if not isinstance(times, (int, float)) or times <= 0:
            raise WeirError("a number above 0", "times")
        self.path, self.times = Path(path), times
        self._found: list[dict] = []

    def open(self, engine: EngineInfo) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def take(self, rows: Rows) -> None:
        norms = rows.decoded().float().norm(dim=-1)
        for k in (norms > self.times * norms.median()).nonzero().flatten().tolist():
            self._found.append(
                {"site": str(rows.site), "position": int(rows.positions[k]), "norm": round(float(norms[k]), 4)}
            )

    def finish(self, request: Finished) -> list[str]:
        line = {"request": request.request_id, "rows": request.prompt_tokens + request.generated_tokens - 1}
        found, self._found = self._found, []
        with self.path.open("a") as file:
            file.write(json.dumps(line | {"odd": found}) + "\n")
        return [str(self.path)]

    def abort(self, request: Finished) -> None:
        self._found = []
