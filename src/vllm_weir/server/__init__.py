"""Weir over HTTP: what vLLM's own routes answer, Weir's own routes, and the command that serves both."""
