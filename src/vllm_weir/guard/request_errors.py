"""Weir's errors as subclasses of vLLM's, by which a server chooses the HTTP status."""

from __future__ import annotations

from vllm_weir.errors import WeirError

try:
    from vllm.exceptions import VLLMClientError as _ClientError
    from vllm.exceptions import VLLMServerError as _ServerError
except ImportError:  # up to 0.28, servers answer a ValueError with 400
    _ClientError = _ServerError = Exception


class WeirRequestError(WeirError, _ClientError):
    """A WeirError that is the client's mistake (HTTP 400)."""

    def __init__(self, message: str, field: str = "") -> None:
        WeirError.__init__(self, message, field)

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class WeirFailure(WeirError, _ServerError):
    """A WeirError that is not the client's mistake (HTTP 500): what was admitted was not done."""
