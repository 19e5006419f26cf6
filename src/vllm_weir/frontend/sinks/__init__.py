"""Sinks: queues and threads that hand rows of finished requests to consumers."""
