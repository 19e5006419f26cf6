"""Plan what each step records and steers."""
