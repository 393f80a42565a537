"""The configuration: its schema, how a file and overrides become one, and checks across keys.

It imports floors 1 to 3, and loads neither torch models nor plug-ins. Start with ``schema.py``.
"""
