"""Samplers: token ids in, token ids out.

They import ``core``, ``learner`` and ``attention``. Start with ``scripted.py``, the deterministic fake, then
``transformers.py``.
"""
