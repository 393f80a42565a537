"""What the turns of a trajectory tell an estimator: the first tool result, prompts. No torch."""

from array import array
from collections.abc import Iterator
from hashlib import blake2b

from condensegrpo.core.shared_sequence import shared, shared_ids
from condensegrpo.core.trajectory import Trajectory


def result_turn(trajectory: Trajectory) -> int:
    """The index among the act turns of the first whose observation carried a tool result; −1: none.

    An error that answers a tool call is a result too: the policy saw what came of its call.
    """
    acts = (turn for turn in trajectory.turns if turn.kind == "act")
    answered = (
        at for at, turn in enumerate(acts) if any(message.tool_call_id is not None for message in turn.observations)
    )
    return next(answered, -1)


def act_turns(trajectory: Trajectory) -> list[int]:
    """For every turn the act turn, counted among the act turns alone, whose advantage it gets.

    A condense turn gets the advantage of the act turn that it was written for, the next one; after the last act turn,
    that of the last.

        act act condense act condense   ─▶   0 1 2 2 2
    """
    acts, indices = 0, []
    for turn in trajectory.turns:
        indices.append(min(acts, trajectory.replies - 1))
        acts += turn.kind == "act"
    return indices


def prompt_digests(trajectory: Trajectory) -> Iterator[bytes]:
    """A digest of the prompt of every act turn, its media included: one that continues the last costs what it adds."""
    digest, last = blake2b(), shared_ids(())
    for turn in trajectory.turns:
        prompt = shared(turn.prompt_ids)
        if not prompt.continues(last):
            digest, last = blake2b(), shared_ids(())
        digest.update(array("I", prompt[len(last) :]))
        last = prompt
        if turn.kind == "act":
            yield digest.digest() + "".join(turn.media).encode()
