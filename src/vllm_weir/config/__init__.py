"""Settings of an engine and the environment variables that make them."""
