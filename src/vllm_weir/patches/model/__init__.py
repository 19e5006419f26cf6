"""What Weir reads in a model that vLLM has loaded: its hook points, facts, weights and unembedding."""
