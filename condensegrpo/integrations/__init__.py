"""Adapters to other libraries of the field: their files and interfaces as those of this package.

May import floors 1 to 4, and an adapter's own library lazily. Start with ``env_class`` for tasks, ``logs`` for logs,
``proxy`` for agents that run elsewhere. Of verifiers, ``verifiers_task`` trains on its tasksets and ``verifiers`` reads
its logs.
"""
