"""Which weights an engine has: a fingerprint of what its workers have loaded, not of a folder."""

from __future__ import annotations

import hashlib
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.frontend.lookup import engine_of, frontend_of


def loaded_weights(llm: Any) -> str:
    """Return the fingerprint of the weights that the workers of an ``LLM`` have now.

    It is that of all ranks' parts together, so another number of ranks gives another one.

    Raises:
        WeirError: if they cannot be read.
    """
    engine = engine_of(llm)
    frontend_of(llm).engine.require_capabilities()
    if engine.is_sleeping():
        raise WeirError("the engine sleeps, so that its weights cannot be read; wake it up first", "llm")
    answers = engine.collective_rpc("weir_weights")
    for answer in answers:
        if isinstance(answer, dict):
            raise WeirError(answer["error"], "llm")
    return hashlib.blake2b("".join(answers).encode(), digest_size=16).hexdigest()
