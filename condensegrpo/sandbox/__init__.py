"""Runs untrusted code. ``sandbox.Sandbox`` is the entry point, ``grade.grade`` judges code by asserts.

It imports ``core.errors`` and the standard library. The files ``server keeper job judge callee plain wire linux
namespaces landlock seccomp syscalls`` run in a process of their own, which imports nothing but the standard library.
Start with ``sandbox.py``.
"""
