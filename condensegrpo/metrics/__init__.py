"""The figures that are logged about trajectories and credit.

It imports ``core`` and ``algorithms``. Start with ``trajectories.py``; ``intervals.py`` has the statistics.
"""
