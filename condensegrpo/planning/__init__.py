"""Predicts the memory of each device from a configuration. It imports floors 1 to 4. Start with ``plan.py``."""
