"""Clients of a ``weir serve`` server: `Client` and `AsyncClient`.

`client` is generated from `async_client` by ``scripts/unasync.py``. What needs no I/O is in `http`
(settings, when to try again), `payload` (bodies of requests), `sse` and `results` (responses).
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
