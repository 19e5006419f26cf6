"""State that the API-server processes of one server share through a directory."""
