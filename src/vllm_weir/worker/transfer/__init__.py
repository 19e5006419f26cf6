"""Rows on their way from the ring to the caller."""
