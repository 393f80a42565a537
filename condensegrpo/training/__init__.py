"""The training loop and its steps: roll out, give credit, update, synchronise the sampler.

It imports floors 1 to 6; only ``train.py`` sees all components. Start with ``train.py``.
"""
