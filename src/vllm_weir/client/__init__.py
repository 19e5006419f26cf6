"""Clients of a ``weir serve`` server: `Client` and `AsyncClient`.

What they do is written once, as *flows* (`protocol`): generators that yield *effects* (`effects`:
send a request, read a chunk, sleep) and are sent the results. `async_client` carries effects out
with httpx; `client` is generated from it by ``scripts/unasync.py``.
"""

from vllm_weir.client.async_client import AsyncClient
from vllm_weir.client.client import Client
from vllm_weir.client.errors import AuthError, NotFound, ServerError, ServiceError, TooLarge
from vllm_weir.client.results import Choice, Chunk, Completion

__all__ = [
    "AsyncClient",
    "AuthError",
    "Choice",
    "Chunk",
    "Client",
    "Completion",
    "NotFound",
    "ServerError",
    "ServiceError",
    "TooLarge",
]
