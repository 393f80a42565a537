"""The learner: packed rows in, optimiser steps out, under DeepSpeed.

It imports ``core`` (errors and trajectories, never messages), ``algorithms``, ``vision`` and ``storage``.
Start with ``engine.py``, then ``logprobs.py``.
"""
