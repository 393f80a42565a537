"""The interfaces of plug-ins, one file for each kind; that of condensers is ``core/condenser.py``.

A plug-in has the methods of its interface and need not inherit from it, except for a condenser. Each interface has a
deterministic fake or a small real implementation in the package. The engine decides *when* a plug-in is called and
names the boundary when it raises; a plug-in raises plain Python errors. The files import the standard library, messages
and trajectories only. Start with ``task.py``.
"""
