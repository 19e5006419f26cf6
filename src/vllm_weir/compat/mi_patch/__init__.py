"""Vllm_mi_patch: its files, its environment variables."""
