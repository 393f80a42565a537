"""Sampling from vLLM servers, started here or on other machines.

It imports ``core``, ``learner`` and ``samplers.vllm``; vLLM runs in other processes. Start with ``sampler.py``;
``pool.py`` drops servers that are lost and takes back those that answer again.
"""
