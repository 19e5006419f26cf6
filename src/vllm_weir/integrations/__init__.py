"""Weir behind the interfaces of other tools."""
