"""Sinks: rows of finished requests are handed to consumers (files, logs, plugins) in threads beside the engine."""
