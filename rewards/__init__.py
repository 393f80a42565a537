"""Rewards: what a finished trajectory is worth.

They import ``core`` and ``sandbox``; ``turns.py`` the branches of ``condensers`` and ``format.py`` a transcript of
``episodes``. Start with ``outcome.py``: whether a trajectory is well formed and right, and the rewards that pay it;
``turns.py`` has the rewards that pay single turns.
"""
