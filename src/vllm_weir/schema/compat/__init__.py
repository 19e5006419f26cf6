"""Other systems' request forms, read as Weir's own."""
