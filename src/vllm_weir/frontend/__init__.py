"""Weir in the caller's process: admit requests, receive rows, attach them to outputs."""
