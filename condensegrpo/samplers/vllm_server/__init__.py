"""Sampling from vLLM servers, started here or on other machines.

It imports ``core``, ``learner`` and ``samplers.vllm``; vLLM runs in other processes. Start with ``sampler.py``;
``replica.py`` and ``pool.py`` drop servers that are lost and take back those that answer again.
"""
