"""Built-in tasks: problems and the environments that pose them.

They import ``core``, ``episodes``, ``storage`` and ``tools``. Start with ``ledger.py``.
"""
