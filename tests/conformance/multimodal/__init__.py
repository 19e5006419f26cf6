"""Models that take images and sound: tiny ones, their reference in transformers, and what Weir serves of them."""
