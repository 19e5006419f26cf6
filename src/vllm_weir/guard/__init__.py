"""What works even where Weir itself cannot load; imports the standard library and vLLM's own modules alone."""
