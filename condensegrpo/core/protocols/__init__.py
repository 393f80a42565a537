"""The interfaces of plug-ins, one file for each kind: a plug-in inherits nothing from them, it has the methods.

Each interface has a deterministic fake or a small real implementation in the package. The engine decides *when* a
plug-in is called and names the boundary when it raises; a plug-in raises plain Python errors. The files import the
standard library, messages and trajectories only. Start with ``condenser.py``.
"""
