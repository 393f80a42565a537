"""The command line: it reads arguments and shows results; every decision is made on the floors below.

It may import every other folder, and nothing imports it. A module imports torch only within its functions, so that its
``--help`` is fast. Start with ``app.py``.
"""
