"""Check the experts that a request makes routers choose against the model."""

from __future__ import annotations

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.schema.model_facts import RoutingFacts
from vllm_weir.schema.replay import FIELD, Replay, ReplayRows
from vllm_weir.schema.routing import Routing

UNKNOWN = RoutingFacts(refused="its router has not been reported")


def replay_of(asked: Routing | None, capabilities: EngineCapabilities) -> ReplayRows | None:
    """Return the experts that routers are made to choose, of a model whose routing is served; None for none.

    Raises:
        WeirError: naming the field, if the engine cannot do so exactly.
    """
    if not isinstance(asked, Replay):
        return None
    model, facts = capabilities.routing, capabilities.facts.routing
    for block in (block for stage in model.stages for block in stage.blocks):
        if why := facts.get(block, UNKNOWN).refused:
            raise WeirError(
                f"no routing is replayed: in block {block}, {why}, so which weights experts have that it did not "
                "choose is not known",
                "routing",
            )
    if connector := capabilities.traits.kv_connector:
        raise WeirError(
            f"this engine's KV connector, {connector}, could give the keys and values of this request to others; "
            "replay on an engine without it",
            FIELD,
        )
    return asked.rows(model)
