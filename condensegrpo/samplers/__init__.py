"""Samplers: token ids in, token ids out.

They import ``core``, ``episodes``, ``learner`` and ``attention``. Start with ``scripted.py``, the fake, then
``transformers.py``.
"""
