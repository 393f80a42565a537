"""Trajectories played in worker processes, which ask the sampler of their rank by token ids.

    rank      pool.py ── connection ── serving.py      worker
    sampler ◀────────   frames of     ────── remote_sampler.py ◀── episodes, tools, rewards
                        messages.py

It imports ``core`` and ``rollout``; what a worker plays with reaches it as a function. Start with ``pool.py``.
"""
