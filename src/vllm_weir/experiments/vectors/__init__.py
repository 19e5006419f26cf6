"""Directions in files: those of other systems are read, and GGUF, safetensors and repeng's object are made."""

from __future__ import annotations
