"""Sampling from vLLM servers, started here or on other machines.

It imports ``core``, ``config`` and ``samplers.vllm``; vLLM runs in other processes. Start with ``sampler.py``.
"""
