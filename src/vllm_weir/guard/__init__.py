"""What works even where Weir itself cannot load.

It imports the standard library, vLLM, and modules of Weir that import no more than these.
"""
