"""Measurements for a GPU that is there for minutes: see README.md."""
