"""The command line: it reads arguments and shows results; every decision is made on the floors below.

It imports every other folder, and nothing imports it. Start with ``app.py``.
"""
