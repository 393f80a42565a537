"""The process group of the ranks: a process leaves what it joined, since NCCL warns at the end of one that has not."""

import leaving
from command import succeed


def test_a_single_process_leaves_its_group_when_it_ends() -> None:
    for program in (leaving.learner, leaving.sampler):
        assert succeed(program=program).splitlines() == ["joined: True", "at the end: False"]
