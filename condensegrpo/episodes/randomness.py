"""Where the randomness of a reply comes from: its own stream, named by what the reply is and by nothing else.

So a trajectory does not depend on who else was in a batch, on the order in which tools return, or on the number of
ranks. Standard library only.
"""

import hashlib


def stream_seed(run_seed: int, step: int, problem_id: str, sample: int, turn: int) -> int:
    """The seed of one reply's random stream: 63 bits, the same in every process and on every machine.

    stream_seed(0, 7, "gsm8k-12", 3, 0)   # run 0, step 7, the fourth trajectory of the problem, first turn
    """
    # the only free text comes last, so that no two names collide
    return _bits(f"{run_seed}/{step}/{sample}/{turn}/{problem_id}")


def problem_draw(run_seed: int, step: int, problem_id: str) -> float:
    """A number in [0, 1) that is equal for all trajectories of a problem."""
    return (_bits(f"{run_seed}/{step}/problem/{problem_id}") >> 10) / 2**53  # 53 bits, so that it never rounds to 1


def _bits(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1
