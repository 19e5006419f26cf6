"""`RequestTemplate`: the params of requests that differ in what they ask of Weir."""

from __future__ import annotations

from typing import Any

from vllm_weir.guard.request_extras import extras_in, set_extras, with_extras
from vllm_weir.schema.fields import with_fields
from vllm_weir.schema.keys import WIRE_KEY
from vllm_weir.schema.request import RequestSpec


class RequestTemplate:
    """Makes params for requests to an engine of this process.

    They carry the `RequestSpec` itself, where `weir.params` writes it as JSON data for any process,
    which admission has to parse again.

    Args:
        params: ``SamplingParams``, which may carry Weir's keys; they stay as they are.

    Raises:
        WeirError: if what they ask of Weir is malformed.
    """

    def __init__(self, params: Any) -> None:
        self._params = params.clone()  # vLLM completes its requests' params, sharing what copies share
        self._extras = extras_in(self._params) or {}
        self._spec = RequestSpec.carried_by(self._extras)

    def asking(self, **fields: Any) -> Any:
        """Return params that ask for the same, but for these fields of a `RequestSpec`."""
        made = with_extras(self._params)
        set_extras(made, {**self._extras, WIRE_KEY: with_fields(self._spec, **fields)})
        return made
