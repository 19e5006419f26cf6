"""Runs of `extract` with an engine that needs no model, texts to run over, and when two datasets are equal."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.extraction.engine import PIECES_AHEAD, PromptRows
from vllm_weir.extraction.feature_writer import FeatureBatch
from vllm_weir.extraction.run import extract
from vllm_weir.extraction.run_spec import RunSpec
from vllm_weir.storage import ActivationDataset, Batch
from vllm_weir.storage.features.parts import RecordFeatures

D = 16
WORDS = [
    "Tom",
    "Anna",
    "went",
    "to",
    "the",
    "garden",
    "and",
    "took",
    "a",
    "boat",
    "early",
    "while",
    "it",
    "was",
    "open",
]


def texts(count: int, seed: int = 0, longest: int = 40) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, longest))) for _ in range(count)]


def write_jsonl(path: Path, values: Sequence[Any], column: str = "text") -> Path:
    path.write_text("".join(json.dumps({column: value, "n": i}) + "\n" for i, value in enumerate(values)))
    return path


def layers_of(layers: Any) -> list[int]:
    """What a run reads: of the fake model's two layers all, some, or the one whose features are read."""
    if layers == "all":
        return [0, 1]
    return [layers] if isinstance(layers, int) else list(layers)


class FakeEngine:
    """Rows are a function of site, position and token; a token is a word."""

    limit = 64
    row_bytes = 2 * D * 4
    weights = "those of the first step"

    def __init__(self, wanted: RunSpec, pause: float = 0.0) -> None:
        self.wanted, self.pause, self.reads = wanted, pause, 0
        self.layers = layers_of(wanted.capture.layers)

    def encode(self, values: Sequence[Any]) -> list[Any]:
        return [self._encode(value) for value in values]

    def _encode(self, value: Any) -> Any:
        if isinstance(value, list):
            value = " ".join(m["content"] for m in value)
        if "unspeakable" in value:
            return WeirError("the chat template refuses it")
        return [sum(word.encode()) % 97 for word in value.split()]

    def read(self, prompts: Sequence[list[int]]) -> list[PromptRows]:
        self.reads += 1
        time.sleep(self.pause)
        return [PromptRows([self._rows(layer, ids) for layer in self.layers], len(ids), 1, "length") for ids in prompts]

    def _rows(self, layer: int, ids: list[int]) -> Batch:
        at = np.arange(len(ids))
        values = (np.array(ids)[:, None] * 31 + at[:, None] * 7 + np.arange(D) + layer * 1000).astype(np.float32)
        return Batch("", "resid_post", layer, at, np.array(ids), torch.from_numpy(values))

    def close(self) -> None:
        pass


class FakeAheadEngine(FakeEngine):
    """Takes pieces while it has others, and computes them when it may take no more.

    Attributes:
        most: the most pieces, prompts and tokens that it had at once.
        unread: pieces that it had when its generator was closed.
    """

    def __init__(self, wanted: RunSpec) -> None:
        super().__init__(wanted)
        self.most, self.unread = (0, 0, 0), 0

    def read_ahead(self, pieces: Iterator[Sequence[list[int]]]) -> Iterator[list[PromptRows]]:
        under_way: deque[Sequence[list[int]]] = deque()
        try:
            while True:
                while len(under_way) < PIECES_AHEAD and (piece := next(pieces, None)) is not None:
                    under_way.append(piece)
                if not under_way:
                    return
                prompts = [ids for piece in under_way for ids in piece]
                now = len(under_way), len(prompts), sum(map(len, prompts))
                self.most = tuple(map(max, self.most, now))
                yield self.read(under_way.popleft())
        finally:
            self.unread = len(under_way)


class FakeFeatureEngine(FakeEngine):
    """Active features are a function of position and token: from none to five of the first 40."""

    def read(self, prompts: Sequence[list[int]]) -> list[PromptRows]:
        self.reads += 1
        time.sleep(self.pause)
        return [PromptRows([FeatureBatch("", fake_features(ids))], len(ids), 1, "length") for ids in prompts]


class SlowFeatureEngine(FakeFeatureEngine):
    def __init__(self, wanted: RunSpec) -> None:
        super().__init__(wanted, pause=0.01)


def fake_features(ids: Sequence[int], record: int = -1) -> RecordFeatures:
    rows = [{(token * 7 + at * 3 + j) % 40: 0.5 + (token + j) / 8 for j in range((token + at) % 6)}
            for at, token in enumerate(ids)]  # fmt: skip
    ordered = [sorted(row.items(), key=lambda item: -item[1]) for row in rows]
    flat = [item for row in ordered for item in row]
    return RecordFeatures(
        record, np.arange(len(ids)), np.array(ids, np.int64), np.zeros(len(ids), bool),
        np.cumsum([0, *map(len, rows)]), np.array([f for f, _ in flat], np.int64),
        np.array([v for _, v in flat], np.float32),
    )  # fmt: skip


def same_features(a: RecordFeatures, b: RecordFeatures) -> bool:
    names = ("positions", "token_ids", "generated", "offsets", "ids", "values")
    return a.record == b.record and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


class SlowEngine(FakeEngine):
    def __init__(self, wanted: RunSpec) -> None:
        super().__init__(wanted, pause=0.01)


def run_fake(source: Path, out: str, **more: Any) -> Any:
    """A run with the fake engine: small batches and shards, published after every batch."""
    options = {"batch": 8, "flush_seconds": 0.0, "start_engine": FakeEngine} | more
    if options.get("layout", "sharded") == "sharded":
        options.setdefault("shard_bytes", 6000)
    return extract(source, "fake", out, **options)


def run_and_die(source: Path, out: str, writes: int, seconds: float, options: dict[str, Any]) -> None:
    """A run that SIGKILLs itself at its n-th call that writes or publishes, or after some seconds."""
    left = [writes]

    def guard(call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapped

    if writes:
        import s3fs

        os.pwrite, os.replace = guard(os.pwrite), guard(os.replace)
        s3fs.S3FileSystem._put_file = guard(s3fs.S3FileSystem._put_file)
    if seconds:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, seconds)
    run_fake(source, out, **options)


def differences(found: ActivationDataset, wanted: ActivationDataset, bound: float = 0.0) -> list[str]:
    """How two datasets differ, row for row: requests, metadata, sites, positions, token ids, and rows.

    Args:
        bound: largest difference of a value, relative to the site's largest; 0 for equal to the bit.
    """
    out = []
    if sorted(found.requests) != sorted(wanted.requests):
        out.append(f"requests: {len(found)} against {len(wanted)}")
    if found.sites != wanted.sites or found.count() != wanted.count():
        out.append(f"sites or rows: {found} against {wanted}")
    for request in sorted(set(found.requests) & set(wanted.requests)):
        a, b = found[request], wanted[request]
        if found.metadata(request) != wanted.metadata(request) or a.sites != b.sites:
            out.append(f"{request}: metadata or sites")
            continue
        for site in a.sites:
            same = torch.equal(a.positions_of(*site), b.positions_of(*site))
            if not same or not torch.equal(a.token_ids_of(*site), b.token_ids_of(*site)):
                out.append(f"{request} {site}: positions or tokens")
            elif a[site].dtype != b[site].dtype or a[site].shape != b[site].shape:
                out.append(f"{request} {site}: dtype or shape")
            elif bound == 0.0:
                if not torch.equal(a[site].view(torch.uint8), b[site].view(torch.uint8)):
                    out.append(f"{request} {site}: bytes of rows")
            elif (worst := _worst(a[site], b[site])) > bound:
                out.append(f"{request} {site}: rows by {worst:.1e}")
    return out


def worst_difference(found: ActivationDataset, wanted: ActivationDataset) -> float:
    """Largest difference of any value, relative to the largest value of its request and site."""
    return max(_worst(found[r][s], wanted[r][s]) for r in wanted.requests for s in wanted[r].sites)


def _worst(a: torch.Tensor, b: torch.Tensor) -> float:
    if not len(b):
        return 0.0
    return ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30)).item()
