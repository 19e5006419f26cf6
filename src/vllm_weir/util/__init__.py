"""General helpers that know nothing of Weir."""
