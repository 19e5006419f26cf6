"""Weir's own HTTP routes."""
