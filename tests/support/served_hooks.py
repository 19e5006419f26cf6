"""Hooks that servers of tests load with ``--weir-hook NAME=tests.support.served_hooks:ATTRIBUTE``, for rows of 256."""

from __future__ import annotations

from typing import Any

import torch

import vllm_weir as weir
from tests.support.hook_functions import clamp_norm, probe_and_steer

W = torch.randn(256, generator=torch.Generator().manual_seed(7)) / 16
STEER = weir.Hook(lambda rows, ctx: probe_and_steer(rows, ctx), layers=[1, 2], args={"w": W, "scale": 3.0})
"""Found by its place in this module: a lambda has no name of its own."""

CLIP = weir.Hook(clamp_norm, layers=[3], args={"most": 12.0})


def watch(rows: Any, ctx: Any) -> Any:
    """Changes nothing."""
    ctx.saved["last"] = {"row": rows[-1], "at": ctx.positions[-1:], "layer": ctx.layer, "none": float("nan")}
    return None, {"norm": rows.norm(dim=1), "row": rows}


def fail(rows: Any, ctx: Any) -> Any:
    raise ValueError("enough")


NUMBER = 5
