"""Requests on their way in: checked, resolved against the engine, put into wire form."""
