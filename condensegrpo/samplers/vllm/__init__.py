"""vLLM inside this process: continuous batching, weight updates, log-probabilities.

It imports ``core`` and ``learner``, and vLLM lazily. Start with ``sampler.py``.
"""
