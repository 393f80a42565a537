"""What the panes of an inspector show of a trajectory, turn by turn: values that a terminal, a page or Python renders.

shown    what the policy was given: ``TurnView.messages``, or its tokens by ``TokenTexts.prompt``
full     ``history.history``: the same with what was dropped and rewritten in its place
reply    ``TurnView.tokens``: each with its surprise, beside the advantage of the turn
credit   ``IndexedTrajectory``: reward parts and score; ``TurnView``: advantage and weight
raw      ``raw``: the turn as it is stored
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from condensegrpo.core.errors import DataError
from condensegrpo.core.messages import Message, ToolCall
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import Condensation, Draft, Turn
from condensegrpo.inspection.batches import TrajectoryBatch, tokenizer_files
from condensegrpo.inspection.context_view import ContextView, context_views
from condensegrpo.storage.credit import Credit


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """One sampled token."""

    id: int
    text: str | None  # None: there is no tokenizer
    logprob: float

    @property
    def surprise(self) -> float:
        """How unlikely it was, in nats: 0 for a token that was certain."""
        return -self.logprob


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedView:
    """A text that the policy wrote for a condenser and that was not used."""

    text: str
    reason: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """One turn of the chosen trajectory."""

    turn: int
    kind: str
    frozen: bool  # written by the initial policy
    policy_version: int | None  # None: not known
    context: ContextView
    condensation: Condensation | None
    messages: tuple[Message, ...]  # the context as rendered
    reply: str
    calls: tuple[ToolCall, ...]
    observations: tuple[Message, ...]
    turn_rewards: Mapping[str, float]  # from the environment
    tool_attempts: int
    tool_successes: int
    tool_seconds: float | None  # None: not known
    draft: Draft | None  # of its answer, before the turn
    answer_logprob: float | None  # nats, of the ground truth given the context; None: not measured
    paid: float | None  # by the reward function, for this turn; None: it pays no single turns
    output_tokens: int
    logprob: float | None  # mean of the output tokens, nats
    advantage: float | None
    weight: float | None  # of one token's loss; 0.0: not trained
    tokens: tuple[TokenView, ...] | None  # None: not requested
    rejected: tuple[RejectedView, ...]  # written for this turn's context, or after the last turn


def turns(
    scored: ScoredTrajectory,
    credit: Credit | None,
    *,
    budget: int,
    tokenizer: "TokenTexts | None",
    version_known: bool = True,
) -> tuple[TurnView, ...]:
    """Every turn of a trajectory; with its tokens if there is a ``tokenizer``.

    ``version_known``: whether the turns' policy versions count the steps of their weights.
    """
    views = context_views(scored.trajectory, budget)
    return tuple(
        TurnView(
            turn=index,
            kind=turn.kind,
            frozen=turn.frozen,
            policy_version=turn.policy_version if version_known else None,
            context=view,
            condensation=turn.condensation,
            messages=tuple(turn.context),
            reply=turn.reply.text,
            calls=turn.reply.tool_calls,
            observations=turn.observations,
            turn_rewards=turn.turn_rewards,
            tool_attempts=turn.tool_attempts,
            tool_successes=turn.tool_successes,
            tool_seconds=turn.tool_seconds,
            draft=turn.draft,
            answer_logprob=turn.answer_logprob,
            paid=scored.score.turn_rewards[index] if index < len(scored.score.turn_rewards) else None,
            output_tokens=len(turn.output_ids),
            logprob=math.fsum(turn.logprobs) / len(turn.logprobs) if turn.logprobs else None,
            advantage=credit.advantages[index] if credit and index < len(credit.advantages) else None,
            weight=credit.weights[index] if credit and index < len(credit.weights) else None,
            tokens=tokenizer.views(turn) if tokenizer else None,
            rejected=tuple(
                RejectedView(text=text.text, reason=text.reason, tokens=len(text.output_ids))
                for text in scored.trajectory.rejected
                if min(text.before, len(views) - 1) == index
            ),
        )
        for index, (turn, view) in enumerate(zip(scored.trajectory.turns, views, strict=True))
    )


class TokenTexts:
    """The texts of token ids by the tokenizer of a run, if there is one."""

    def __init__(self, batch: TrajectoryBatch) -> None:
        self.file = next((file for file in tokenizer_files(batch) if file.is_file()), None)
        self._tokenizer = None
        if self.file is not None:
            from tokenizers import Tokenizer  # compiled code: only when there is a file

            self._tokenizer = Tokenizer.from_file(str(self.file))

    @cache  # noqa: B019  as many as tokens of the vocabulary
    def text(self, token: int) -> str | None:
        """The text of one token; of part of a character, the tokenizer's name for it."""
        if self._tokenizer is None:
            return None
        plain: str = self._tokenizer.decode([token], skip_special_tokens=False)
        if plain and "\ufffd" not in plain:
            return plain
        name: str | None = self._tokenizer.id_to_token(token)
        return name

    def views(self, turn: Turn) -> tuple[TokenView, ...]:
        """The sampled tokens of a turn; none where they are not known, see ``Turn.is_text``."""
        pairs = zip(() if turn.is_text else turn.output_ids, turn.logprobs, strict=True)
        return tuple(TokenView(id=token, text=self.text(token), logprob=logprob) for token, logprob in pairs)

    def prompt(self, turn: Turn) -> str | None:
        """The prompt of a turn as text, special tokens included; None: there is no tokenizer."""
        if self._tokenizer is None:
            return None
        text: str = self._tokenizer.decode(list(turn.prompt_ids), skip_special_tokens=False)
        return text


def raw(line: bytes, turn: int) -> str:
    """The stored JSON of a turn, indented, with lists of numbers on one line.

    Raises:
        DataError: it is no line of a trajectory, as when the file was replaced.
    """
    try:
        stored = json.loads(line)["trajectory"]["turns"][turn]
    except (ValueError, LookupError, TypeError) as error:
        raise DataError("reading a turn: its file was replaced. Open its step again.") from error
    numbers = re.compile(r"\[\s+(-?[\d][^\[\]{}\"a-z]*?)\s+\]")
    return numbers.sub(lambda match: f"[{' '.join(match[1].split())}]", json.dumps(stored, indent=2))
