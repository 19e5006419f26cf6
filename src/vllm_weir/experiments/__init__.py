"""Experiments on a served model: sweeps, fitted directions, attribution."""

from __future__ import annotations
