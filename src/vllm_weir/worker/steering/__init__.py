"""Device tables of programs and vectors, and what they are filled from."""
