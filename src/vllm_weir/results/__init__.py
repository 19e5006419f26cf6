"""The results of a request."""
