"""What holds even where Weir itself cannot load: the standard library, and vLLM's own modules, alone."""
