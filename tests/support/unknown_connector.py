"""A KV connector that Weir does not know."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class OwnConnector(ExampleConnector):
    """It might find keys and values by anything."""
