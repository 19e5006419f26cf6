"""Probes on the device: their scores, the factors of their gates, and how both get to the caller."""
