"""Admission: requests are checked, resolved against the engine, and put into the form that travels to it."""
