"""Python looks for garbage less often while trajectories are played."""

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from condensegrpo.core.process import GARBAGE_THRESHOLDS, postpone_collections, rare_collections, resume_collections


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_blocks_that_overlap_end_with_the_last() -> None:
    first, second = rare_collections(), rare_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == GARBAGE_THRESHOLDS
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("usual", [(0, 10, 10), (10**6, 100, 1000)])
def test_a_collector_that_never_looks_or_more_rarely_stays_so(usual: tuple[int, int, int]) -> None:
    gc.set_threshold(*usual)
    with rare_collections():
        assert gc.get_threshold() == usual
    assert gc.get_threshold() == usual


def test_all_objects_are_not_looked_at_again_in_a_block() -> None:
    with rare_collections():
        before = [generation["collections"] for generation in gc.get_stats()]
        kept = [[number] for number in range(200_000)]
        after = [generation["collections"] for generation in gc.get_stats()]
    assert (after[2] - before[2], after[1] - before[1], len(kept)) == (0, 0, 200_000)
    assert after[0] - before[0] < 15


def test_what_a_command_loads_is_not_looked_at_again_and_nothing_changes_where_no_command_was_started() -> None:
    resume_collections()
    assert gc.get_threshold() == (700, 10, 10)
    before = gc.get_freeze_count()
    postpone_collections()
    looked = gc.get_stats()[2]["collections"]
    loaded = [[number] for number in range(200_000)]
    resume_collections()
    assert gc.get_stats()[2]["collections"] == looked
    assert gc.get_freeze_count() >= before + len(loaded)
    assert gc.get_threshold() == (700, 10, 10)


def test_libraries_print_nothing_at_the_exit() -> None:
    pytest.importorskip("triton", reason="triton, which prints at the exit, is not installed")
    program = (
        "from condensegrpo.core.process import postpone_collections, resume_collections\n"
        "postpone_collections()\nimport triton._C.libtriton\nresume_collections()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
