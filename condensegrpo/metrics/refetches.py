"""What a policy fetched again because a condenser had dropped it. Pure functions.

turn 2   <read> p3 </read>   ─▶   p3 red 7        called for the first time
turn 6   …                        turn 2 is no longer shown
turn 8   <read> p3 </read>   ─▶   p3 red 7        the same call, its result gone: a re-fetch
turn 9   <read> p3 </read>   ─▶   p3 red 7        the same call, its result in sight: a repetition and no re-fetch
turn 9   recall(2)           ─▶   p3 red 7        the tool of the condenser ``recall``: always a re-fetch
"""

from typing import NamedTuple

from condensegrpo.core.messages import Message
from condensegrpo.core.results import recalled_turn
from condensegrpo.core.trajectory import Trajectory


class Fetches(NamedTuple):
    """The calls of a trajectory that tools, or an environment as one, answered."""

    calls: int
    refetches: int  # those that ask once more for what no result in sight holds

    @property
    def rate(self) -> float:
        """Re-fetches as a share of the calls; 0 of none."""
        return self.refetches / self.calls if self.calls else 0.0


def fetches(trajectory: Trajectory) -> Fetches:
    """Count them. A call is what a reply asks for: tool and arguments, or the reply itself where it has no parsed call.

    Calls that got no tool result (a message with ``tool_call_id``) do not count. Its result is in sight where a message
    of the turn's context equals it, so that one that was masked or summarised is gone.
    """
    answered: dict[tuple[str, ...], set[Message]] = {}
    calls = refetched = 0
    for turn in trajectory.turns:
        results = {message for message in turn.observations if message.tool_call_id is not None}
        if not results:
            continue
        recalled = {result.tool_call_id for result in results if recalled_turn(result) is not None}
        parsed = (((call.name, call.arguments), call.id in recalled) for call in turn.reply.tool_calls)
        for call, again in tuple(parsed) or (((turn.reply.text.strip(),), False),):
            calls += 1
            earlier = answered.get(call)
            refetched += again or (earlier is not None and earlier.isdisjoint(turn.context))
            answered.setdefault(call, set()).update(results)
    return Fetches(calls, refetched)
