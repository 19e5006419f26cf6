"""Sinks: rows of finished requests on their way to consumers (files, logs, plugins), beside the engine."""
