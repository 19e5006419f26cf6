"""Lenses that are fitted: their files, and what they do to rows of the stream."""
