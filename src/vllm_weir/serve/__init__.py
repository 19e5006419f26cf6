"""Weir in `vllm serve`: routes beside vLLM's own, and what the API-server processes of one server share."""
