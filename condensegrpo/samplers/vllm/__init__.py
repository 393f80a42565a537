"""vLLM inside this process: continuous batching, weight updates, log-probabilities.

It imports ``core`` and imports vLLM lazily. Start with ``sampler.py``.
"""
