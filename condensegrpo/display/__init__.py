"""Trajectories, progress and tables on a terminal, for ``api.py`` and the command line alike.

It imports everything below the command line, above all the values of ``inspection``. Start with
``trajectory_view.py``, which draws a trajectory, and ``console.py``, which a run prints on.
"""
