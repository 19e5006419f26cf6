"""Experiments on an engine: sweeps of patches, fitted directions, vectors from files, attribution."""

from __future__ import annotations
