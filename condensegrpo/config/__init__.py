"""The configuration: its schema, how a file and overrides become one, and checks across keys.

It imports floors 1 to 3 and loads no model; sections of ``use.py`` load the plug-ins that they name. Start with
``schema.py``.
"""
