"""Captures a model's attention from queries and keys and turns it into a score for each unit of a history.

It imports ``core`` and ``episodes``. Start with ``scorer.py``, then ``capture.py``.
"""
