"""Experiments on a model: activation patching over many places, and what else asks an engine many questions."""
