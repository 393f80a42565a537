"""Runs code that nobody vouches for. ``sandbox.Sandbox`` is the door, ``grade.grade`` judges code by asserts.

The files ``server keeper job judge callee plain wire linux namespaces landlock seccomp syscalls`` run in a process of
their own, which imports nothing but the standard library.
"""
