"""Surfaces of other tools."""
