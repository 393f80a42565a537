"""Rewards: what a finished trajectory is worth.

They import ``core``, ``sandbox`` and ``storage``. Start with ``outcome.py``: whether a trajectory is well formed and
right, and the rewards that pay it; ``turns.py`` has the rewards that pay single turns.
"""
