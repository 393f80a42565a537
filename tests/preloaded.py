"""What a process to fork has imported: `forked.py`. Its forks look for garbage only in what is theirs."""

from condensegrpo.core.start_up import postpone_collections, resume_collections

postpone_collections()

import datasets  # noqa: E402, F401
import matplotlib.backends.backend_agg  # noqa: E402
import matplotlib.figure  # noqa: E402, F401
import pytest.__main__  # noqa: E402, F401  multiprocessing imports the main module of the tests into every child
import transformers.models.qwen3.modeling_qwen3  # noqa: E402, F401

import condensegrpo.reporting.run_report  # noqa: E402
import condensegrpo.samplers.batch  # noqa: E402
import condensegrpo.training.train  # noqa: E402, F401

resume_collections()
