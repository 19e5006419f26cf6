"""Desks of engines that are not there."""

from __future__ import annotations

from typing import Any

from vllm_weir.config.settings import Settings
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.engine_frontend import EngineFrontend


def frontend_of(capabilities: EngineCapabilities, **settings: Any) -> EngineFrontend:
    """A desk that knows what the workers serve; to be closed."""
    frontend = EngineFrontend(Settings(**settings), chunked=True)
    frontend.engine.capabilities = capabilities
    return frontend
