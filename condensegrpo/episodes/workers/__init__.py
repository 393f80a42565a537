"""Trajectories played in worker processes, which request samples from their rank by token ids.

    rank      pool.py ── processes.py or ray_actors.py ── worker.py
    sampler ◀────────      pickles of messages.py       ───────── episodes, tools, rewards

It imports ``core`` and ``episodes``; what a worker plays with reaches it as a function. Start with ``pool.py``.
"""
