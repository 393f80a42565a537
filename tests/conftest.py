"""Fixtures that several files use, and the order of the files."""

import gc
from collections.abc import Iterator

import pytest
import torch

from condensegrpo.core.start_up import postpone_collections, resume_collections

# files that take longest, longest first: a file is run by one worker, and a long one at the end leaves the others idle
LONG = (
    "train",
    "chaos",
    "doctor_gpu",
    "serve",
    "vllm_tensor_parallel",
    "vllm_train",
    "sweep",
    "algorithms",
    "checkpoint",
    "rollout_benchmark",
    "agents_of_others",
    "engine",
    "prefetching",
    "export",
    "vllm_sampler",
    "lora",
    "cli",
    "vllm_server",
    "openai_sampler",
    "recipes",
    "parity",
    "train_condensers",
    "api",
    "offload",
    "notebooks",
    "inspect_app",
    "plan",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first (with pytest-xdist's --no-loadscope-reorder)."""
    order = {f"test_{name}.py": index for index, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONG)))


def pytest_sessionstart() -> None:
    """Import the tests, and what they import, without looking for garbage among it."""
    postpone_collections()


def pytest_collection_finish() -> None:
    """Look for garbage from here on, in what tests leave: DeepSpeed collects whenever it opens, moves and closes."""
    gc.collect()
    resume_collections()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes in one thread: sums are in the same order every time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
