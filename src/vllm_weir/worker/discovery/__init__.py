"""Find the hook points of a loaded model and verify them."""
