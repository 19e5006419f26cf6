"""Admission: requests are checked, resolved, and put into the form that travels to the engine."""
