"""What a request gets back."""
