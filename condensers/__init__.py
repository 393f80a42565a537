"""Condensers: how a history is rewritten before a turn.

They import ``core`` only. Start with ``whole_units.py``.
"""
