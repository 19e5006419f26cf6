"""`weir sites`: which hook points of a model can be captured and steered."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from vllm_weir.api import sites
from vllm_weir.schema.hooks import HOOKS, MODEL_HOOKS, READ_ONLY_HOOKS
from vllm_weir.schema.model_facts import SiteVerdict
from vllm_weir.schema.rows import RowShape
from vllm_weir.util.start_llm import start_llm


def survey(model: str, **engine_args: Any) -> list[SiteVerdict]:
    """Load a model into a small engine and return the verdict on each of its sites; WeirError if that cannot be."""
    small = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_memory_bytes": 256 << 20}
    llm = start_llm(model, {"skip_tokenizer_init": True, "enforce_eager": True} | small | engine_args)
    try:
        return sites(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()


def show(model: str, verdicts: Sequence[SiteVerdict]) -> None:
    """Print one line for each hook point with each shape of rows or reason."""
    from rich.console import Console
    from rich.table import Table

    table = Table("hook point", "blocks", "row", "served", "why not", title=model)
    for hook in HOOKS:
        of_hook = [v for v in verdicts if v.hook == hook]
        of_hook.sort(key=lambda v: (not v.supported, v.reason, v.shape, v.read_only, v.layer))
        for (reason, shape, read_only), group in groupby(of_hook, key=lambda v: (v.reason, v.shape, v.read_only)):
            layers = "" if hook in MODEL_HOOKS else spans([v.layer for v in group])
            served = "[yellow]read only" if read_only or hook in READ_ONLY_HOOKS else "[green]yes"
            table.add_row(hook, layers, row_text(shape), "[red]no" if reason else served, reason or read_only)
    Console(file=sys.stdout).print(table)


def row_text(shape: RowShape) -> str:
    """Format the shape of a row: ``(32, 128)`` as ``"32 x 128"``, and of a pattern ``"32 x keys"``."""
    return " x ".join(str(n) if n else "keys" for n in shape)


def spans(numbers: Sequence[int]) -> str:
    """Format ascending numbers with their runs joined: ``[0, 1, 2, 5]`` as ``"0-2, 5"``."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
