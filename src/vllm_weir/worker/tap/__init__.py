"""The tap: the op in the compiled graph, where it is installed, and its kernels."""
