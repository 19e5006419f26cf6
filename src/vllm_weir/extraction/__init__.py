"""A whole dataset of texts to a dataset of activations: resumable, exactly once, on one engine or on Ray."""

from __future__ import annotations
