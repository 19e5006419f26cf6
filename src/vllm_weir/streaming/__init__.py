"""Streams of rows from an engine to a trainer, in batches that each arrive exactly once."""
