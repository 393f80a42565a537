"""The learner: packed rows in, optimiser steps out. Knows nothing of messages."""

import os

import torch

if not torch.accelerator.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns on the console, when imported, of no GPU
