"""Rewards: what a finished trajectory is worth.

They import ``core`` and ``sandbox``. Start with ``correct.py``.
"""
