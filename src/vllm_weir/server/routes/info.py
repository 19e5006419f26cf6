"""The route that describes the server."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from vllm_weir.server.errors import declared
from vllm_weir.server.limits import ServerLimits
from vllm_weir.server.routes.router import State, weir_router
from vllm_weir.server.shipped import EXAMPLES
from vllm_weir.util.shipped import demo_model


class SiteInfo(BaseModel):
    """A hook point of a block; `why` gives the reason if it is not served.

    `shape` is that of a row, such as [d_model], [heads, d_head] or [d_mlp]; 0 stands for the number
    of keys, which differs from row to row. It is empty if the hook point is not served. `read_only`
    says why it cannot be steered, if that is so in this model.
    """

    hook: str
    layer: int
    served: bool
    why: str
    read_only: str
    shape: list[int]


class ServerInfo(BaseModel):
    """The server. `limits` has no paths; `admin` says whether there is an admin key.

    `examples` are messages that suit the model; empty for others than the shipped one.
    """

    version: str
    model: str
    num_layers: int
    d_model: int
    dtype: str
    sites: list[SiteInfo]
    limits: dict[str, int | float]
    admin: bool
    examples: list[str]


def router() -> APIRouter:
    """Return the route GET /v1/weir/info."""
    routes = weir_router()

    @routes.get("/v1/weir/info", responses=declared(400, 401), summary="The model, its hook points, and the limits")
    async def info(state: State) -> ServerInfo:
        from vllm_weir import __version__, sites_async

        verdicts = await sites_async(state.engine_client)
        capabilities = state.frontend.engine.require_capabilities()
        return ServerInfo(
            version=__version__,
            model=state.frontend.model,
            num_layers=capabilities.num_layers,
            d_model=capabilities.d_model,
            dtype=capabilities.dtype,
            sites=[
                SiteInfo(
                    hook=v.hook,
                    layer=v.layer,
                    served=v.supported,
                    why=v.reason,
                    read_only=v.read_only,
                    shape=list(v.shape),
                )
                for v in verdicts
            ],
            limits=public_limits(state.limits),
            admin=state.admin_key is not None,
            examples=list(EXAMPLES) if state.frontend.model == demo_model() else [],
        )

    return routes


def public_limits(limits: ServerLimits) -> dict[str, int | float]:
    return limits.model_dump(exclude={"directory", "store"})
