"""Seeded faults: each is put into a copy of the source, and the tests named for it have to fail there."""
