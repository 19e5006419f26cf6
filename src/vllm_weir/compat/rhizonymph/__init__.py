"""The fork RhizoNymph/vllm: its request fields, its routes, its files."""
