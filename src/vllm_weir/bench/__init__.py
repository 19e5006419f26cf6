"""The benchmark `weir bench`: stock vLLM, Weir and others, timed and checked by one command."""
