"""Steering on the worker: device tables of programs and vectors, and how vectors get there."""
