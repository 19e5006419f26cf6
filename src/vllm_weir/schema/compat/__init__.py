"""Request forms of other systems, translated to Weir's."""
