"""Pictures and the models that see them: decoding, the processor of a model's family, features and positions.

It imports ``core``; transformers, torch and Pillow only where a picture is used. Start with ``processor.py``.
"""
