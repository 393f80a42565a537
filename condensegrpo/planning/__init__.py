"""Predicts the memory of each device from a configuration, without loading weights. Start with ``plan.py``."""
