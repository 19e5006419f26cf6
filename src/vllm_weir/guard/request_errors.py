"""Weir's errors in the kinds by which vLLM knows whose mistake one is."""

from __future__ import annotations

from vllm_weir.errors import WeirError

try:
    from vllm.exceptions import VLLMClientError as _ClientError
    from vllm.exceptions import VLLMServerError as _ServerError
except ImportError:  # up to 0.28 a ValueError is what servers answer with 400
    _ClientError = _ServerError = Exception


class WeirRequestError(WeirError, _ClientError):
    """A WeirError that vLLM, too, knows for the client's mistake (HTTP 400)."""

    def __init__(self, message: str, field: str = "") -> None:
        WeirError.__init__(self, message, field)

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class WeirFailure(WeirError, _ServerError):
    """A WeirError that vLLM, too, knows for none of the client's (HTTP 500): what was admitted was not done."""
