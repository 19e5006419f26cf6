"""Activations of every text of a dataset, on one engine or on Ray; runs can be resumed."""

from __future__ import annotations
