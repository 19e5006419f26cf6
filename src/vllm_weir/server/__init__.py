"""Weir over HTTP: its part in the responses of vLLM's routes, and its own routes."""
