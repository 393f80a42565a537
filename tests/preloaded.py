"""What a process to fork has imported: `forked.py`. Its forks look for garbage only in what is theirs."""

from condensegrpo.core.start_up import postpone_collections, resume_collections

postpone_collections()

# after it (E402), and not used here (F401): a fork finds them imported
import datasets  # noqa: E402, F401
import matplotlib.backends.backend_agg  # noqa: E402
import matplotlib.figure  # noqa: E402, F401
import PIL.Image  # noqa: E402
import pytest.__main__  # noqa: E402, F401  multiprocessing imports the main module of the tests into every child
import transformers.models.qwen3.modeling_qwen3  # noqa: E402, F401
import typer.rich_utils  # noqa: E402, F401

import condensegrpo.condensers.last_k  # noqa: E402
import condensegrpo.evaluation.study  # noqa: E402
import condensegrpo.planning.remedies  # noqa: E402
import condensegrpo.reporting.run_plot  # noqa: E402
import condensegrpo.reporting.run_report  # noqa: E402
import condensegrpo.rewards.weighted_sum  # noqa: E402
import condensegrpo.samplers.decoding  # noqa: E402
import condensegrpo.tasks.ledger  # noqa: E402
import condensegrpo.training.run_setup  # noqa: E402
import condensegrpo.training.train  # noqa: E402, F401

PIL.Image.init()  # its plug-ins, which the first picture would import

import deepspeed.module_inject.auto_ep_layer  # noqa: E402, F401  deepspeed.initialize imports it; last: train chose the device

resume_collections()
