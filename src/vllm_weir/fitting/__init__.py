"""Directions from rows of two classes: pure arithmetic on whatever device the rows are on."""

from __future__ import annotations
