"""The demonstration: a small model, the stories it was trained on, and what can be read off it."""
