"""Attribution patching on a transformers twin, verified by real patches in the engine."""

from __future__ import annotations
