"""The points inside attention and MLP of a block: found by noise, verified by what arrives."""
