"""Runs untrusted code. ``sandbox.Sandbox`` is the entry point, ``grade.grade`` tests code by asserts.

It imports ``core.errors`` and the standard library. The files ``server supervisor job judge candidate wire calls
linux namespaces seccomp folders program`` run in processes of their own and import the standard library only.
``program`` supervises the programs of the task ``agent``, which are limited but not confined. Start with
``sandbox.py``.
"""
