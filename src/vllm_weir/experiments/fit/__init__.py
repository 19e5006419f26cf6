"""`weir.fit`: directions from contrastive prompts."""

from __future__ import annotations
