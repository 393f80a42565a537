"""Built-in tools: plain typed functions and classes whose ``__call__`` is the tool.

They import ``core``, ``storage`` and ``sandbox``. Start with ``calculator.py``.
"""
