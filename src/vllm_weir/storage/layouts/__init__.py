"""How datasets lie in files."""
