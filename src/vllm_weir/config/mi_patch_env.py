"""The environment variables ``VLLM_ACT_*`` of Vllm_mi_patch, as a sink for every request."""

from __future__ import annotations

import functools
import logging
import multiprocessing
from collections.abc import Mapping
from typing import Any

from vllm_weir.config.env import warn_of_unknown
from vllm_weir.errors import WeirError
from vllm_weir.schema.compression import RP_MAX, RP_MIN

logger = logging.getLogger(__name__)
NAME = "VLLM_ACT"
"""The sink's name."""
_ON, _OFF = ("1", "true", "on"), ("0", "false", "off", "")
_MODES = ("rp8", "full8", "topk8", "none")
_VARIABLES = ("CAPTURE", "MODE", "RP_K", "RP_SEED", "TOPK_K", "OUTDIR", "RETURN", "PER_DIM")
_WITHOUT_EFFECT = ("BITS", "ATTNM", "HIDDEN_SIZE")
"""Variables without effect: codes always have 8 bits, attention is not kept, and the width is the
model's."""
_RETURNS = ("sharded", "gathered", "summary")


def act_sink(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the wire form of the sink that these variables ask for, or None.

    The variables and their defaults:

    * ``VLLM_ACT_CAPTURE`` (0): whether rows are captured.
    * ``_MODE`` (rp8): rp8, full8, topk8 or none. ``_RP_K`` (512) and ``_RP_SEED`` (12345) belong to
    rp8,
      ``_TOPK_K`` (64; all values of a narrower model) to topk8.
    * ``_OUTDIR`` (/tmp/vllm_activations): folder of the files.
    * ``_RETURN`` (sharded): sharded or gathered write files with whole rows, since every rank holds
    the
      whole residual stream; summary logs running norms and writes no files.
    * ``_PER_DIM``: no effect, scales are per row, because a scale per dimension of a single row
    would
      keep nothing of it. ``_BITS``, ``_ATTNM`` and ``_HIDDEN_SIZE``: no effect.

    Others are unknown, and logged.

    Raises:
        WeirError: naming the variable that is wrong.
    """
    # Variables without effect are no good suggestions for misspelt ones.
    checked = {name: text for name, text in environ.items() if name.removeprefix(f"{NAME}_") not in _WITHOUT_EFFECT}
    warn_of_unknown(checked, f"{NAME}_", _VARIABLES)
    if not _flag(environ, "CAPTURE", "0"):
        return None
    mode = _choice(environ, "MODE", "rp8", _MODES)
    returns = _choice(environ, "RETURN", "sharded", _RETURNS)
    if _flag(environ, "PER_DIM", "0") and mode in ("rp8", "full8") and returns != "summary":
        _warn_of_per_dim()
    compress: dict[str, Any] | None = None
    if mode == "rp8":
        compress = {
            "method": mode,
            "k": _number(environ, "RP_K", 512, RP_MIN, RP_MAX),
            "seed": _number(environ, "RP_SEED", 12345, least=0),
        }
    elif mode == "topk8":
        compress = {"method": mode, "k": _number(environ, "TOPK_K", 64)}
    elif mode == "full8":
        compress = {"method": mode}
    capture: dict[str, Any] = {"hook": "resid_post", "layers": "all"}
    if returns == "summary":
        return {"logging": {}, "capture": [capture], "required": False}
    if compress is not None:
        capture["compress"] = compress
    outdir = environ.get(f"{NAME}_OUTDIR", "/tmp/vllm_activations")
    return {"filesystem": {"url": outdir, "layout": "npz"}, "capture": [capture], "required": True}


@functools.cache
def _warn_of_per_dim() -> None:
    # Engine processes, which vLLM names so, would repeat the warning of their parent.
    if not multiprocessing.current_process().name.startswith(("EngineCore", "VllmWorker")):
        logger.warning(
            "VLLM_ACT_PER_DIM has no effect: each row is scaled as a whole, because a scale per dimension of one row "
            "keeps nothing of it"
        )


def _flag(environ: Mapping[str, str], name: str, default: str) -> bool:
    text = environ.get(f"{NAME}_{name}", default).strip().lower()
    if text not in _ON + _OFF:
        raise WeirError(f"expected 0 or 1, got {text[:40]!r}", f"{NAME}_{name}")
    return text in _ON


def _choice(environ: Mapping[str, str], name: str, default: str, choices: tuple[str, ...]) -> str:
    text = environ.get(f"{NAME}_{name}", default).strip().lower()
    if text not in choices:
        raise WeirError(f"unknown {text[:40]!r}; choose from {', '.join(choices)}", f"{NAME}_{name}")
    return text


def _number(environ: Mapping[str, str], name: str, default: int, least: int = 1, most: int = 10**18) -> int:
    text = environ.get(f"{NAME}_{name}", str(default)).strip()
    if not text.isdecimal() or len(text) > 18 or not least <= int(text) <= most:
        allowed = f"of at least {least}" if most == 10**18 else f"from {least} to {most}"
        raise WeirError(f"expected a whole number {allowed}, got {text[:40]!r}", f"{NAME}_{name}")
    return int(text)
