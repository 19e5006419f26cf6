"""Hook points that are derived: attention patterns and chosen experts, computed from rows of other points."""
