"""Vllm_mi_patch's environment variables ``VLLM_ACT_*``, read as a sink for every request. Pure data."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_weir.config.env import warn_of_unknown
from vllm_weir.config.settings import Settings
from vllm_weir.errors import WeirError
from vllm_weir.schema.compression import RP_MAX, RP_MIN
from vllm_weir.schema.sinks import parse_sinks

logger = logging.getLogger(__name__)
NAME = "VLLM_ACT"
"""The sink's name."""
_ON, _OFF = ("1", "true", "on"), ("0", "false", "off", "")
_MODES = ("rp8", "full8", "topk8", "none")
_VARIABLES = ("CAPTURE", "MODE", "RP_K", "RP_SEED", "TOPK_K", "OUTDIR", "RETURN", "PER_DIM")
_IDLE = ("BITS", "ATTNM", "HIDDEN_SIZE")
"""Vllm_mi_patch's variables without a meaning here: codes have 8 bits in both, attention is not kept by either, and the
width is the model's."""
_RETURNS = ("sharded", "gathered", "summary")


def settings_of(additional_config: object, environ: Mapping[str, str] = os.environ) -> Settings:
    """Return an engine's settings, see `Settings.load`, with the sink that these variables ask for."""
    settings, sink = Settings.load(additional_config, environ), act_sink(environ)
    if sink is None:
        return settings
    definition = replace(parse_sinks({NAME: sink}, NAME)[NAME], fits_width=True)
    return settings.model_copy(update={"sinks": {**settings.sinks, NAME: definition}})


def act_sink(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the wire form of the sink that these variables ask for, or None without ``VLLM_ACT_CAPTURE``.

    ============ ================== ===================================================================
    variable     default            meaning
    ============ ================== ===================================================================
    ``CAPTURE``  0                  whether to capture
    ``MODE``     rp8                compression: rp8, full8, topk8 or none
    ``RP_K``     512                values of a row with rp8
    ``RP_SEED``  12345              seed of rp8's projection
    ``TOPK_K``   64                 values of a row with topk8; all of a narrower model's
    ``OUTDIR``   /tmp/vllm_activations
    ``RETURN``   sharded            sharded, gathered: files with whole rows, since every rank holds the
                                    whole residual stream; summary: running norms in the log, no files
    ``PER_DIM``  0                  no effect: a scale per dimension of a single row keeps nothing
    ============ ================== ===================================================================

    ``BITS``, ``ATTNM`` and ``HIDDEN_SIZE`` have no meaning here; any other name is warned about.
    """
    # Names without a meaning are left out, so that the warning does not suggest them.
    warn_of_unknown(
        {k: v for k, v in environ.items() if k.removeprefix(f"{NAME}_") not in _IDLE}, f"{NAME}_", _VARIABLES
    )
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
    logger.warning(
        "VLLM_ACT_PER_DIM has no effect: a row is scaled as a whole; a scale per dimension of one row keeps nothing"
    )


def _flag(environ: Mapping[str, str], name: str, default: str) -> bool:
    text = environ.get(f"{NAME}_{name}", default).strip().lower()
    if text not in _ON + _OFF:
        raise WeirError(f"0 or 1, got {text[:40]!r}", f"{NAME}_{name}")
    return text in _ON


def _choice(environ: Mapping[str, str], name: str, default: str, choices: tuple[str, ...]) -> str:
    text = environ.get(f"{NAME}_{name}", default).strip().lower()
    if text not in choices:
        raise WeirError(f"unknown {text[:40]!r}; choose from {', '.join(choices)}", f"{NAME}_{name}")
    return text


def _number(environ: Mapping[str, str], name: str, default: int, least: int = 1, most: int = 10**18) -> int:
    text = environ.get(f"{NAME}_{name}", str(default)).strip()
    if not text.isdecimal() or len(text) > 18 or not least <= int(text) <= most:
        which = f"of at least {least}" if most == 10**18 else f"from {least} to {most}"
        raise WeirError(f"a whole number {which}, got {text[:40]!r}", f"{NAME}_{name}")
    return int(text)
