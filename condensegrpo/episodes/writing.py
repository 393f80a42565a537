"""Condense turns: the policy writes a text for a condenser. A used text is a turn, a rejected text is not trained.

turn 4   act        pinned u0 u1 u2 u3              → reply, which becomes u4
turn 5   condense   pinned u0 u1 u2 u3 u4 "sum up"  → S      turn 4 continued by ids: same system prefix, same tools
turn 6   act        pinned [S] u4                   → reply   declared condensation
"""

from collections.abc import Sequence

from condensegrpo.core.condenser import Request, WrittenSummary
from condensegrpo.core.messages import History
from condensegrpo.core.trajectory import StopReason
from condensegrpo.episodes.boundary import EndEpisode
from condensegrpo.episodes.conversation import EpisodeState, WrittenText
from condensegrpo.episodes.sampling import sample
from condensegrpo.episodes.view import request_view


class SummaryWriter:
    """Samples condense turns for one call of a condenser, and keeps the texts."""

    def __init__(self, conversation: EpisodeState, history: History) -> None:
        """``history``: that the condenser is given."""
        self._conversation, self._history = conversation, history
        self.texts: list[WrittenText] = []

    def check(self, rejected: Sequence[str]) -> None:
        """Check that at most one of the texts was not rejected."""
        if len(self.texts) - len(rejected) not in (0, 1):
            raise EndEpisode(
                StopReason.ENVIRONMENT_ERROR,
                f"the condenser {self._conversation.engine.condenser_name!r} asked for {len(self.texts)} texts and "
                f"rejected {len(rejected)}, wanted all rejected but the last, or all (Condensed.rejected)",
            )

    async def write(self, request: Request) -> WrittenSummary:
        """Sample the text of a request."""
        conversation, room = self._conversation, self._conversation.engine.limits.max_output_tokens
        if len(self.texts) == conversation.texts:
            raise RuntimeError(f"it asks for more texts than the {conversation.texts} that its property writes allows")
        view = request_view(conversation.engine, self._history, conversation.last, request)
        output = await sample(
            conversation,
            view,
            seed=conversation.next_seed(),
            max_tokens=room if request.max_tokens is None else min(room, request.max_tokens),
            request=request,  # and no stop strings of tool calls, which would end a summary that quotes a call
        )
        self.texts.append(WrittenText(view, output))
        return WrittenSummary(text=output.reply.message.text, finish=output.finish, tokens=len(output.token_ids))
