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
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from condensegrpo.core.messages import Message, ToolCall
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import Condensation, Draft, SpanStatus, Trajectory, Turn
from condensegrpo.episodes.toolformats import transcript
from condensegrpo.inspection.records import IndexedTrajectory
from condensegrpo.storage.trajectories import Credit, read_row


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextView:
    """The make-up of one prompt; pinned + kept + rewritten + newest is its length exactly."""

    turn: int
    statuses: Mapping[int, SpanStatus]  # what this prompt shows of every unit before it, by turn
    tokens: int  # of the prompt
    pinned: int  # system message, question, examples
    kept: int  # earlier units, verbatim
    rewritten: int  # text in place of units that were rewritten or dropped
    newest: int  # what answered the last reply
    saved: int  # tokens that the prompt would hold besides, had nothing ever been condensed
    grown: int  # tokens that condensing added to this prompt, where what it wrote is longer
    free: int  # up to the budget
    budget: int

    @property
    def strip(self) -> str:
        """What the prompt shows of each earlier turn, a letter each: k kept, d dropped, r rewritten, - none."""
        shown = (self.statuses.get(earlier, "-") for earlier in range(self.turn))
        return "".join(status[0] for status in shown)


def context_views(trajectory: Trajectory, budget: int) -> tuple[ContextView, ...]:
    """The make-up of every prompt of a trajectory against a budget in tokens, computed without a tokenizer.

    Worked example, budget 64: pinned messages of 18 tokens, units of 13 and 12 (each a reply and what answered it).

        turn 0   prompt 18             pinned 18
        turn 1   prompt 31, continues  pinned 18, newest observation 4, kept 9                    units: kept
        turn 2   prompt 30, condensed  pinned 18, newest observation 4, kept 8, saved 13 of 43    units: dropped, kept
    """
    views: list[ContextView] = []
    for index, turn in enumerate(trajectory.turns):
        if turn.condensation is not None:
            views.append(_condensed(index, trajectory.turns, turn.condensation, budget))
        elif index == 0:
            views.append(_view(0, {}, tokens=len(turn.prompt_ids), pinned=len(turn.prompt_ids), budget=budget))
        else:
            views.append(_continued(index, trajectory.turns, views[-1], budget))
    return tuple(views)


def newest_messages(context: Sequence[Message]) -> tuple[Message, ...]:
    """The messages after the last reply in a context; none if there is no reply."""
    replies = [index for index, message in enumerate(context) if message.role == "assistant"]
    return tuple(context[replies[-1] + 1 :]) if replies else ()


def _continued(index: int, turns: Sequence[Turn], last: ContextView, budget: int) -> ContextView:
    """A prompt that begins with the last prompt and output: everything in it stays what it was."""
    tokens, output = len(turns[index].prompt_ids), len(turns[index - 1].output_ids)
    return _view(
        index,
        {**last.statuses, index - 1: SpanStatus.KEPT},
        tokens=tokens,
        pinned=min(last.pinned, tokens),
        rewritten=last.rewritten,
        newest=max(0, tokens - last.tokens - output),
        saved=last.saved,
        budget=budget,
    )


def _condensed(index: int, turns: Sequence[Turn], declared: Condensation, budget: int) -> ContextView:
    tokens = len(turns[index].prompt_ids)
    first = len(turns[0].prompt_ids)
    if turns[0].condensation is not None:  # the prompt before condensing without its units
        first = max(0, declared.tokens_before - sum(span.tokens for span in declared.spans))
    pinned = min(tokens, first)
    kept = sum(span.tokens for span in declared.spans if span.status is SpanStatus.KEPT)
    changed = any(span.status is not SpanStatus.KEPT for span in declared.spans)
    return _view(
        index,
        {turn: span.status for span in declared.spans for turn in span.turns if turns[turn].kind == "act"},
        tokens=tokens,
        pinned=pinned,
        rewritten=max(0, tokens - pinned - kept) if changed else 0,
        newest=_newest(index, turns, declared, tokens - pinned),
        saved=max(0, declared.tokens_before - tokens),
        grown=max(0, tokens - declared.tokens_before),
        budget=budget,
    )


def _view(
    index: int,
    statuses: Mapping[int, SpanStatus],
    *,
    tokens: int,
    pinned: int,
    rewritten: int = 0,
    newest: int = 0,
    saved: int = 0,
    grown: int = 0,
    budget: int,
) -> ContextView:
    """A view whose parts add up: what is neither pinned, newest nor rewritten was kept."""
    newest = min(newest, tokens - pinned)
    rewritten = min(rewritten, tokens - pinned - newest)
    return ContextView(
        turn=index,
        statuses=statuses,
        tokens=tokens,
        pinned=pinned,
        kept=tokens - pinned - newest - rewritten,
        rewritten=rewritten,
        newest=newest,
        saved=saved,
        grown=grown,
        free=max(0, budget - tokens),
        budget=budget,
    )


def _newest(index: int, turns: Sequence[Turn], declared: Condensation, room: int) -> int:
    """Tokens of the newest observation: known if its unit alone was kept, else shared out by characters."""
    if index == 0 or not declared.spans:
        return 0
    last = declared.spans[-1]
    latest = max((earlier for earlier in range(index) if turns[earlier].kind == "act"), default=-1)
    if last.status is SpanStatus.KEPT and last.first == last.last == latest:
        return min(room, max(0, last.tokens - len(turns[latest].output_ids)))
    context = turns[index].context
    body = context[len(turns[0].context) :]
    shown = sum(len(message.text) for message in newest_messages(context))
    total = sum(len(message.text) for message in body)
    return min(room, round(room * shown / total)) if total else 0


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
    frozen: bool  # by another writer than the policy
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
    tool_seconds: float | None  # of the environment, where no tool was called; None: not known
    media: tuple[str, ...]  # hashes of the pictures in the prompt
    picture_tokens: int  # of the prompt, those that stand for pictures
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
            reply=transcript(turn.reply),
            calls=turn.reply.tool_calls,
            observations=turn.observations,
            turn_rewards=turn.turn_rewards,
            tool_attempts=turn.tool_attempts,
            tool_successes=turn.tool_successes,
            tool_seconds=turn.tool_seconds,
            media=turn.media,
            picture_tokens=turn.picture_tokens,
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

    def __init__(self, candidates: Iterable[Path]) -> None:
        """Read the first tokenizer that there is."""
        self.file = next((file for file in candidates if file.is_file()), None)
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


def raw_turn(record: IndexedTrajectory, turn: int) -> str:
    """A turn as it is stored, as indented JSON with lists of numbers on one line."""
    stored = read_row(record.stored)["turns"][turn]
    stored["prompt_ids"] = [*array("I", stored["prompt_ids"])]
    numbers = re.compile(r"\[\s+(-?[\d][^\[\]{}\"a-z]*?)\s+\]")
    return numbers.sub(lambda match: f"[{' '.join(match[1].split())}]", json.dumps(stored, indent=2))
