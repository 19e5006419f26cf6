"""The demonstration: a small model that tells stories, and what can be read off it."""
