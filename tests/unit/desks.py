"""Desks of engines that are not there."""

from __future__ import annotations

from typing import Any

from vllm_weir.frontend.desk import Desk
from vllm_weir.frontend.facts import EngineFacts
from vllm_weir.settings import Settings


def desk_of(facts: EngineFacts, **settings: Any) -> Desk:
    """A desk that knows what the workers serve; to be closed."""
    desk = Desk(Settings(**settings), chunked=True)
    desk.facts = facts
    return desk
