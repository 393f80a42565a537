"""The trajectory engine: from a problem to a scored trajectory.

It imports ``core`` only; samplers, condensers, tools and rewards reach it as arguments. Start with ``episode.py``, then
``group.py``.
"""
