"""What every folder builds on: errors, messages, trajectories, the protocols of plug-ins, and how plug-ins are found.

It imports the standard library only, and nothing else of the package.
Start with ``trajectory.py``, then the folder ``protocols``.
"""
