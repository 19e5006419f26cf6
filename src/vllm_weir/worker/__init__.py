"""The worker's half: plan, tap, ring, drain."""
