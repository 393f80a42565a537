"""Evaluates a policy on held-out problems and compares condensers.

It imports floors 1 to 5. Start with ``evaluate.py``.
"""
