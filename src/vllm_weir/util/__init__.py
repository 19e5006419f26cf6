"""Small helpers that know nothing of Weir."""
