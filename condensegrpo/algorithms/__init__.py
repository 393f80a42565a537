"""How scores become gradients: advantages, losses, token weights, and the rows and micro-batches they apply to.

Pure functions on tensors: it imports ``core`` and torch, and does no input or output.
Start with ``credit.py``, then ``advantages.py`` and ``losses.py``.
"""
