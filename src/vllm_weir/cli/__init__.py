"""Commands: `weir` and its subcommands."""
