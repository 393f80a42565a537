"""The inspector as an application of the terminal, on the values of ``condensegrpo.inspection``.

May import textual, rich and lower floors; no torch. Start with ``app``.
"""
