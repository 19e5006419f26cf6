"""`weir sites`: which hook points of a model are served, found on the model itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from vllm_weir.api import sites
from vllm_weir.schema.hooks import HOOKS, MODEL_HOOKS
from vllm_weir.schema.site_verdict import SiteVerdict


def survey(model: str, **engine_args: Any) -> list[SiteVerdict]:
    """Load `model` into a small engine and ask it; raises WeirError if Weir does not serve the model at all.

    `engine_args` are those of ``vllm.LLM``.
    """
    from vllm import LLM

    llm = LLM(
        model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        kv_cache_memory_bytes=256 << 20,
        disable_log_stats=True,
        **engine_args,
    )
    try:
        return sites(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()


def show(model: str, verdicts: Sequence[SiteVerdict]) -> None:
    """Print one line for each hook point and each reason."""
    from rich.console import Console
    from rich.table import Table

    table = Table("hook point", "blocks", "served", "why not", title=model)
    for hook in HOOKS:
        mine = sorted((v for v in verdicts if v.hook == hook), key=lambda v: (not v.supported, v.reason, v.layer))
        for reason, group in groupby(mine, key=lambda v: v.reason):
            layers = "" if hook in MODEL_HOOKS else spans([v.layer for v in group])
            table.add_row(hook, layers, "[red]no" if reason else "[green]yes", reason)
    Console(file=sys.stdout).print(table)


def spans(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``"0-2, 5"``."""
    out: list[list[int]] = []
    for n in numbers:
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in out)
