"""What the processes of one server share through a directory."""
