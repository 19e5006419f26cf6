"""vllm-lens: its request keys, its methods of ``LLM``, its tensors and functions."""
