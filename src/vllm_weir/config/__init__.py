"""Engine settings, and the environment variables that Weir reads."""
