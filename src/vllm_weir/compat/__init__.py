"""Other systems: what they ask, translated to Weir's form where it enters, and what they are answered."""
