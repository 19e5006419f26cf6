"""Which of two prompts is patched with rows of the other."""

from __future__ import annotations

from typing import Any, Literal, cast

from vllm_weir.errors import WeirError, brief

Mode = Literal["denoise", "noise"]
DENOISE: Mode = "denoise"
"""The corrupt prompt is run, with clean rows put in."""
NOISE: Mode = "noise"
"""The clean prompt is run, with corrupt rows put in."""
MODES = (DENOISE, NOISE)


def parse_mode(mode: Any) -> Mode:
    if mode not in MODES:
        raise WeirError(f"unknown mode {brief(mode)!r}; choose from {', '.join(MODES)}", "mode")
    return cast("Mode", mode)
