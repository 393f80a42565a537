"""Simulates a run on a cluster: the real rollout engine in virtual time, with stand-ins for what needs hardware.

Episodes, condensers, renderer, the balancing of requests, prefetching and the staleness schedule are those of a run;
servers, learner, weight transfer, tools and replies are models of their time. It imports floors 1 to 7. Start with
``simulate.py``.
"""
