"""Activation patching over layers, positions, hook points and heads: `sweep` and `Sweep`."""
