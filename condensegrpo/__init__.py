"""Multi-turn GRPO for language-model agents whose context is condensed before every turn.

The floors of the house are listed in ``docs/explanation/architecture.md``. Importing this package imports nothing else.
"""

__version__ = "0.1.0"
