"""How the commands of experiments start an engine."""

from __future__ import annotations

import os
from typing import Any

from vllm_weir.errors import WeirError


def start_llm(model: str, options: dict[str, Any]) -> Any:
    """Return an ``LLM`` that logs errors only.

    Args:
        model: directory or hub id.
        options: of ``vllm.LLM``.

    Raises:
        WeirError: naming ``engine``, if vLLM refuses the model or the options.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM

    try:
        return LLM(model=model, **{"disable_log_stats": True} | options)
    except WeirError:
        raise
    except (TypeError, ValueError, OSError) as e:
        raise WeirError(f"vLLM cannot start: {e}", "engine") from None
