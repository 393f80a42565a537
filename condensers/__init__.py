"""Condensers: how a history is rewritten before a turn.

They import ``core`` only. Start with ``last_k.py``.
"""
