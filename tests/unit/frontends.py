"""Desks of engines that are not there."""

from __future__ import annotations

from typing import Any

from vllm_weir.config.settings import Settings
from vllm_weir.frontend.admission.engine_info import EngineFacts
from vllm_weir.frontend.engine_frontend import Desk


def desk_of(facts: EngineFacts, **settings: Any) -> Desk:
    """A desk that knows what the workers serve; to be closed."""
    desk = Desk(Settings(**settings), chunked=True)
    desk.facts = facts
    return desk
