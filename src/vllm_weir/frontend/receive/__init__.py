"""Rows on their way in, from the workers to the caller."""
