"""The plan of each step: which rows are captured, where they go, and which tokens are steered."""
