"""Runs untrusted code. ``sandbox.Sandbox`` is the entry point, ``grade.grade`` tests code by asserts.

It imports ``core.errors`` and the standard library. The files ``server supervisor job judge candidate values wire
isolation limits result usage script linux namespaces landlock seccomp disk_budget folders syscalls program`` run in
processes of their own, which import nothing but the standard library. ``program`` supervises the programs of the task
``agent``, which are limited but not confined. Start with ``sandbox.py``.
"""
