"""Clients of a ``weir serve`` server: `Client` and `AsyncClient`.

request -> flow (generators, no I/O: retries, downloads, streams) -> sync / aio (httpx) -> answer
"""

from vllm_weir.client.aio import AsyncClient
from vllm_weir.client.answer import Choice, Chunk, Completion
from vllm_weir.client.errors import AuthError, NotFound, ServerError, ServiceError, TooLarge
from vllm_weir.client.sync import Client

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
