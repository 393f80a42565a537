"""Fixtures that several files use, and the order of the files."""

import gc
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module

import pytest
import torch
import workers
from hypothesis import HealthCheck, settings

from condensegrpo.core.process import postpone_collections, resume_collections

# no example fails because the machine stood still while it was made or tried
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # they run on the CPU; `condensegrpo doctor --gpu` tries a GPU

# files that take longest, longest first: a file is run by one worker, and a long one at the end leaves the others idle
LONG = (
    "train",
    "engine",
    "algorithms",
    "vllm_sampler",
    "agents_of_others",
    "rollout_workers",
    "doctor_gpu",
    "sweep",
    "vllm_server",
    "train_condensers",
    "seeing",
    "recipes",
    "textworld",
    "mcp_task",
    "checkpoint",
    "inspect_app",
    "lora",
    "verifiers_task",
    "openenv",
    "agent",
    "cli",
    "inspect",
    "launch",
    "compiled_layers",
    "credit_gradient",
    "tracking",
    "offload",
    "proxy",
    "notebooks",
    "prefetching",
    "inspector_page",
    "attention_kernels",
    "parity",
    "study",
    "sandbox_hostile",
    "serve",
    "export",
    "api",
    "plan",
    "preflight",
    "doctor",
    "wheel",
    "methods",
    "launchers",
    "batch_invariance",
    "seeing_train",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the number of forks that run the files; 0 runs them in this process."""
    parser.addoption("--workers", type=int, default=0, help="run the files in so many forks, made after collection")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the files in forks, if any were asked for."""
    count = session.config.getoption("workers")
    if not count or session.testsfailed or session.config.option.collectonly:
        return None
    workers.run(session, count)
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first."""
    order = {f"test_{name}.py": index for index, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONG)))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import the tests, and what they import, without looking for garbage among it.

    SIGINT is what it is at a terminal: a shell ignores it in jobs in the background, and children inherit that.
    """
    if session.config.getoption("workers"):
        workers.start_the_process_of_commands()
    postpone_collections()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Look for garbage from here on, in what tests leave: DeepSpeed collects whenever it opens, moves and closes.

    Forks find imported what DeepSpeed imports under ZeRO 1 to 3, which takes each a second.
    """
    if session.config.getoption("workers"):
        with warnings.catch_warnings(action="ignore"):  # torch uses what it deprecates
            import_module("condensegrpo.learner.deepspeed_import")  # else DeepSpeed prints which device it found
            import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # brings torch's compiler
    gc.collect()
    resume_collections()
    global _objects
    _objects = gc.get_freeze_count()


_modules, _objects = len(sys.modules), 0  # loaded, and left out of collections, when that was done last


@pytest.fixture(scope="module", autouse=True)
def _leave_out_what_was_loaded() -> Iterator[None]:
    """Leave out what a file has loaded too, and again after vLLM was closed: a collection of DeepSpeed's took a second.

    Closing vLLM's engine makes collections look at everything (``gc.unfreeze``). Not after every test: to count what is
    left out takes 30 ms.
    """
    yield
    global _modules, _objects
    if len(sys.modules) > _modules + 200 or gc.get_freeze_count() < _objects // 2:
        gc.collect()
        gc.freeze()
        _modules, _objects = len(sys.modules), gc.get_freeze_count()


@pytest.fixture(scope="module", autouse=True)
def _handlers_of_signals() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM: a command that a file runs in this process leaves its own."""
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes in one thread: sums are in the same order every time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
