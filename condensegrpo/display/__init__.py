"""Trajectories, progress and tables on a terminal, for ``api.py`` and the command line alike.

It imports everything below the command line, above all the values of ``inspection``. Start with
``trajectory_view.py`` for what a trajectory looks like, and with ``console.py`` for what a run prints.
"""
