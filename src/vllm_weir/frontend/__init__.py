"""The caller's half: admit requests, receive rows, attach them to outputs."""
