"""Condense turns: the policy writes what a condenser asks for. What is used is a turn, what is rejected trains nothing.

turn 4   act        pinned u0 u1 u2 u3              → reply, which becomes u4
turn 5   condense   pinned u0 u1 u2 u3 u4 "sum up"  → S      turn 4 continued by ids: same system prefix, same tools
turn 6   act        pinned [S] u4                   → reply   declared condensation
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from condensegrpo.core.messages import History, Message
from condensegrpo.core.protocols import Request, Write, Writes, Written
from condensegrpo.core.trajectory import Rejected, Stop, Turn
from condensegrpo.rollout.boundary import Ended
from condensegrpo.rollout.engine import Engine
from condensegrpo.rollout.prompt import Asked, Prompt, asking
from condensegrpo.rollout.sampling import Sampled, sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A text that the policy wrote."""

    prompt: Prompt
    sampled: Sampled

    def turn(self) -> Turn:
        """The attempt as the turn that it is once it was used."""
        generation = self.sampled.generation
        return Turn(
            prompt_ids=self.prompt.ids,
            output_ids=generation.token_ids,
            logprobs=generation.logprobs,
            policy_version=self.sampled.version,
            kind="condense",
            condensation=self.prompt.condensation,
            context=self.prompt.context,
            reply=Message(role="assistant", content=self.sampled.text),
        )

    def rejected(self, before: int, reason: str) -> Rejected:
        """The attempt as what it is if it was not used."""
        return Rejected(
            before=before,
            prompt_ids=self.prompt.ids,
            output_ids=self.sampled.generation.token_ids,
            policy_version=self.sampled.version,
            text=self.sampled.text,
            reason=reason,
        )


class Writer:
    """Samples condense turns for one call of a condenser, and remembers what was written."""

    def __init__(self, engine: Engine, trajectory: str, seed: Callable[[], int]) -> None:
        """Write with an engine, for the trajectory of this id; ``seed`` gives a new seed each time it is called."""
        self._engine = engine
        self._trajectory = trajectory
        self._seed = seed
        self.most = engine.condenser.writes if isinstance(engine.condenser, Writes) else 0
        self.attempts: list[Attempt] = []

    def bound(self, history: History, last: Asked) -> Write | None:
        """What the condenser may call; None if it never asks."""
        return partial(self._write, history, last) if self.most else None

    def check(self, rejected: Sequence[str]) -> None:
        """Check that of all that was written at most one text was not rejected.

        Raises:
            Ended: the condenser left open which text it used.
        """
        if len(self.attempts) - len(rejected) not in (0, 1):
            raise Ended(
                Stop.ENVIRONMENT_ERROR,
                f"the condenser {self._engine.condenser_name!r} asked for {len(self.attempts)} texts and rejected "
                f"{len(rejected)}, wanted all rejected but the last, or all (Condensed.rejected)",
            )

    async def _write(self, history: History, last: Asked, request: Request) -> Written:
        """Sample what a request asks for.

        Raises:
            RuntimeError: the condenser asks more often than it said (``Writes.writes``).
            ContextOverflow: the request does not fit the context budget.
        """
        if len(self.attempts) == self.most:
            raise RuntimeError(f"it asks for a text once more than the {self.most} times that its writes allows")
        prompt = asking(self._engine, history, last, request)
        room = self._engine.limits.max_output_tokens
        sampled = await sample(
            self._engine,
            prompt.ids,
            trajectory=self._trajectory,
            seed=self._seed(),
            max_tokens=room if request.max_tokens is None else min(room, request.max_tokens),
            stop_strings=(),  # those of tool calls would end a summary that quotes one
        )
        self.attempts.append(Attempt(prompt=prompt, sampled=sampled))
        return Written(text=sampled.text, finish=sampled.generation.finish)


def sorted_out(
    attempts: Sequence[Attempt], reasons: Sequence[str], *, before: int
) -> tuple[Attempt | None, tuple[Rejected, ...]]:
    """The attempt that was used, if any, and the others, of which the condenser rejected one for each of ``reasons``.

    Args:
        before: index of the first turn to come.
    """
    used = attempts[len(reasons)] if len(attempts) > len(reasons) else None
    following = before + (used is not None)
    others = zip(attempts, reasons, strict=False)
    return used, tuple(attempt.rejected(following, reason) for attempt, reason in others)
