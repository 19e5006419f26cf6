"""What works even where Weir itself cannot load.

Imports the standard library and vLLM's own modules alone.
"""
