"""Adapters to other libraries of the field: their files and interfaces as those of this package.

They import floors 1 to 4, and an adapter's own library lazily. Start with ``env_class`` for tasks, ``proxy`` for agents
that run elsewhere.
"""
