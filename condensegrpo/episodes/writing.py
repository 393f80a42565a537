"""Condense turns: the policy writes a text for a condenser. A used text is a turn, a rejected text is not trained.

turn 4   act        pinned u0 u1 u2 u3              → reply, which becomes u4
turn 5   condense   pinned u0 u1 u2 u3 u4 "sum up"  → S      turn 4 continued by ids: same system prefix, same tools
turn 6   act        pinned [S] u4                   → reply   declared condensation
"""

from collections.abc import Callable, Sequence
from functools import partial

from condensegrpo.core.condenser import Request, WriteSummary, WrittenSummary
from condensegrpo.core.messages import History
from condensegrpo.core.trajectory import StopReason
from condensegrpo.episodes.boundary import Boundary, EndEpisode
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.prompt import AnsweredView, request_view
from condensegrpo.episodes.sampling import Sampled, sample


def texts_allowed(engine: Engine) -> int:
    """How many texts the condenser may ask for in one call."""
    with Boundary(f"the condenser {engine.condenser_name!r}", plugin=engine.condenser):
        return engine.condenser.writes


class SummaryWriter:
    """Samples condense turns for one call of a condenser, and keeps the texts."""

    def __init__(self, engine: Engine, max_texts: int, trajectory: str, seed: Callable[[], int]) -> None:
        """``trajectory`` names the trajectory to samplers, ``seed`` returns a new seed at each call."""
        self._engine = engine
        self._trajectory = trajectory
        self._seed = seed
        self.max_texts = max_texts
        self.attempts: list[Sampled] = []

    def write_function(self, history: History, last: AnsweredView | None) -> WriteSummary | None:
        """The function that the condenser may call; None if it never asks for text."""
        return partial(self._write, history, last) if self.max_texts else None

    def check(self, rejected: Sequence[str]) -> None:
        """Check that at most one of the texts was not rejected."""
        if len(self.attempts) - len(rejected) not in (0, 1):
            raise EndEpisode(
                StopReason.ENVIRONMENT_ERROR,
                f"the condenser {self._engine.condenser_name!r} asked for {len(self.attempts)} texts and rejected "
                f"{len(rejected)}, wanted all rejected but the last, or all (Condensed.rejected)",
            )

    async def _write(self, history: History, last: AnsweredView | None, request: Request) -> WrittenSummary:
        """Sample the text of a request."""
        if len(self.attempts) == self.max_texts:
            raise RuntimeError(f"it asks for more texts than the {self.max_texts} that its property writes allows")
        view = request_view(self._engine, history, last, request)
        room = self._engine.limits.max_output_tokens
        sampled = await sample(
            self._engine,
            view,
            trajectory=self._trajectory,
            seed=self._seed(),
            max_tokens=room if request.max_tokens is None else min(room, request.max_tokens),
            stop_strings=(),  # stop strings of tool calls would end a summary that quotes a call
            request=request,
        )
        self.attempts.append(sampled)
        generation = sampled.generation
        return WrittenSummary(
            text=sampled.read.message.text, finish=generation.finish, tokens=len(generation.token_ids)
        )
