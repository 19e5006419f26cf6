"""`weir bench`: stock vLLM, Weir, vllm-lens and vLLM's own extract_hidden_states, timed and checked by one command."""
