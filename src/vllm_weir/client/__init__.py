"""Clients of a ``weir serve`` server: `WorkerProcess` and `AsyncClient`.

request -> flow (generators, no I/O: retries, downloads, streams) -> sync / aio (httpx) -> answer
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
