# ruff: noqa: E402, F401  imports stand after the first call, and are not used here: a fork finds them imported
"""What a process to fork has imported and cached: `forked.py`. Its forks look for garbage only in what is theirs."""

from condensegrpo.core.process import postpone_collections, resume_collections

postpone_collections()

import datasets
import matplotlib.backends.backend_agg
import matplotlib.figure
import PIL.Image
import pytest.__main__  # multiprocessing imports the main module of the tests into every child
import transformers.models.qwen3.modeling_qwen3
import typer.rich_utils
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import condensegrpo.cli.evaluate
import condensegrpo.cli.inspect
import condensegrpo.cli.runs
import condensegrpo.cli.train
import condensegrpo.condensers.whole_units
import condensegrpo.core.plugins
import condensegrpo.planning.remedies
import condensegrpo.reporting.plots
import condensegrpo.reporting.run_report
import condensegrpo.rewards.weighted_sum
import condensegrpo.samplers.decoding
import condensegrpo.tasks.ledger
import condensegrpo.training.run_setup
import condensegrpo.training.train

PIL.Image.init()  # its plug-ins, which the first picture would import
get_checkpoint_conversion_mapping("qwen3")  # 0.1 s, cached
condensegrpo.tasks.ledger.Ledger().problems("eval")  # the quickstart's: 0.2 s, cached
condensegrpo.core.plugins.installed("tasks")  # reads the entry points of all packages, cached for this search path

# deepspeed.initialize imports them, the second under ZeRO 1 to 3 with torch's compiler: 1 s. Last: train chose device
import deepspeed.module_inject.auto_ep_layer
import deepspeed.runtime.zero.muon.muon_optimizer

resume_collections()
