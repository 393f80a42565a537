"""Builds what a configuration names; the only folder that loads plug-ins.

It imports floors 1 to 4. Start with ``build.py``.
"""
