"""What the tests share: tiny models, a HuggingFace oracle, naive references, live engines."""
