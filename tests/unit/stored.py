"""Synthetic activations, written and compared."""

from __future__ import annotations

import math
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_weir.storage import ActivationDataset, Batch, Writer, load, open_writer

SITES = (("resid_pre", 0), ("resid_post", 0), ("resid_post", 3))
D = 48
PROMPT = 5

WORKERS = multiprocessing.get_context("forkserver")
"""Starts a DataLoader's workers from a process without threads: a fork of a test's may inherit a lock that is held."""
WORKERS.set_forkserver_preload(["torch", "vllm_weir.storage"])


SHAPES = {
    ("resid_post", 1): (D,),
    ("q", 1): (6, 32),
    ("k", 1): (2, 32),
    ("mlp_post", 1): (5 * D,),
    ("router_logits", 1): (7,),
    ("expert_ids", 1): (2,),
    ("expert_weights", 1): (2,),
}
"""Sites of one request whose rows differ in shape."""


def shaped_rows(n: int) -> dict[tuple[str, int], torch.Tensor]:
    """Rows of `SHAPES`; expert ids are int64, with some that no float holds."""
    out = {}
    for (hook, layer), shape in SHAPES.items():
        rows = rows_of("shaped", hook, layer, n, math.prod(shape)).view(n, *shape)
        out[hook, layer] = (rows.double() * 2**60).long() | 1 if hook == "expert_ids" else rows
    return out


def rows_of(
    request: str, hook: str, layer: int, n: int, d: int = D, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Rows that follow from their names."""
    seed = sum(ord(c) * 31**i for i, c in enumerate(f"{request}/{hook}/{layer}")) % 2**31
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)).to(dtype)


def length_of(request: str) -> int:
    return 6 + sum(map(ord, request)) % 7


def tokens_of(n: int) -> np.ndarray:
    return np.arange(n) * 3 + 1


def write(writer: Writer, request: str, *, finish: bool = True, pieces: int = 2, **options: Any) -> None:
    """One request, in pieces that alternate between the sites."""
    n = length_of(request)
    for part in np.array_split(np.arange(n), pieces):
        for hook, layer in SITES:
            rows = rows_of(request, hook, layer, n, **options)[torch.from_numpy(part)]
            writer.write(Batch(request, hook, layer, part, tokens_of(n)[part], rows))
    if finish:
        writer.finish_request(request, {"prompt_tokens": PROMPT, "text": request})


def make(path: Path | str, layout: str, names: list[str], *, compress: object = None, **options: Any) -> None:
    with open_writer(path, layout, compress=compress, **options) as writer:
        for name in names:
            write(writer, name)


def check(dataset: ActivationDataset, names: list[str], *, summed: bool = True) -> None:
    """The dataset holds exactly these requests, whole, to the bit, and all their rows (or none) have checksums."""
    assert dataset.layout == "npz" or (dataset.index.run_has_checksums == summed).all()
    assert sorted(dataset.requests) == sorted(names)
    for name in names:
        n = length_of(name)
        acts = dataset[name]
        assert [tuple(s) for s in acts.sites] == list(SITES)
        assert acts.positions.tolist() == list(range(n))
        assert acts.token_ids.tolist() == tokens_of(n).tolist()
        for hook, layer in SITES:
            assert torch.equal(acts[hook, layer], rows_of(name, hook, layer, n)), (name, hook, layer)
        assert dataset.metadata(name) == {"prompt_tokens": PROMPT, "text": name}


def read_all(path: Path) -> None:
    """Read all that a dataset says and holds."""
    dataset = load(path)
    for name in dataset:
        dict(dataset[name])
        dataset.metadata(name)
