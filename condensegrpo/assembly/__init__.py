"""Builds what a configuration names, and checks and rehearses it before a run.

It imports floors 1 to 4. Start with ``build.py``.
"""
