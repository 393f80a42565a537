"""Rewards: what a finished trajectory is worth.

They import ``core``, ``sandbox`` and ``storage``. Start with ``verdict.py``, whether a trajectory is well formed and
right; ``outcome.py`` and ``turns.py`` hold the rewards that pay an outcome and single turns.
"""
