"""What ``inspect-trajectory`` shows, as data: read once, then drawn on a terminal or printed as JSON."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from condensegrpo.cli.context_view import ContextView, context_views
from condensegrpo.cli.filters import FIELDS, Fields
from condensegrpo.cli.opening import InspectedStep, tokenizer_files
from condensegrpo.core.messages import Message, ToolCall
from condensegrpo.core.trajectory import Condensation, Draft, ScoredTrajectory, Turn
from condensegrpo.storage.credit import Credit


@dataclass(frozen=True, slots=True, kw_only=True)
class Sibling:
    """The figures of one trajectory."""

    number: int  # its place in the file by groups and samples, from 0; --trajectory takes it
    id: str
    group: str
    sample: int
    problem: str
    question: str | None  # None: not known
    ground_truth: str | None  # None: there is no answer in text, or it is not known
    score: float
    correct: float
    format: bool
    components: Mapping[str, float]
    advantages: tuple[float, ...] | None  # (K,); None: not known
    handling: str | None  # Credit.handling; None: not known
    turns: int
    context: int  # the largest, in tokens
    output: int  # tokens of all turns
    stop: str
    answer: str | None
    seconds: float

    @property
    def advantage(self) -> float | None:
        """The mean over turns; None: not known, or there is no turn."""
        return math.fsum(self.advantages) / len(self.advantages) if self.advantages else None

    @property
    def fields(self) -> Fields:
        """The values of ``filters.FIELDS``, for ``--where`` and ``--sort``."""
        return dict(zip(FIELDS, attrgetter(*FIELDS)(self), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The trajectories of one problem in one step."""

    id: str
    problem: str
    question: str | None  # None: not known
    ground_truth: str | None  # None: there is no answer in text, or it is not known
    signal: bool | None  # False: it does not train, no member has an advantage; None: no credit was given (yet)
    siblings: tuple[Sibling, ...]  # by sample

    @property
    def idle(self) -> str:
        """Why it does not train; empty: it may train."""
        handled = {sibling.handling for sibling in self.siblings}
        if "drop" in handled:
            return "dropped"
        if handled == {"mask"}:
            return "masked"
        return "no signal" if self.signal is False else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """One sampled token."""

    id: int
    text: str | None  # None: there is no tokenizer to ask
    logprob: float


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
    draft: Draft | None  # of its answer, before the turn
    answer_logprob: float | None  # nats, of the ground truth given the context; None: not measured
    paid: float | None  # by the reward function, for this turn; None: it pays no single turns
    output_tokens: int
    logprob: float | None  # mean of the output tokens, nats
    advantage: float | None
    weight: float | None  # of one token's loss; 0.0: not trained
    tokens: tuple[TokenView, ...] | None  # None: not asked for
    rejected: tuple[RejectedView, ...]  # written for this turn's context, or after the last turn


def siblings(step: InspectedStep) -> tuple[Sibling, ...]:
    """The figures of every trajectory, in the order of groups and samples."""
    ordered = sorted(
        (scored.trajectory for scored in step.scored), key=lambda one: (_natural(one.group_id), one.sample, one.id)
    )
    numbers = {trajectory.id: number for number, trajectory in enumerate(ordered)}
    every = (_sibling(scored, numbers[scored.trajectory.id], step.credit) for scored in step.scored)
    return tuple(sorted(every, key=lambda sibling: sibling.number))


def groups(every: Sequence[Sibling]) -> tuple[Group, ...]:
    """The trajectories by group, in order of appearance."""
    by_group: dict[str, list[Sibling]] = {}
    for sibling in every:
        by_group.setdefault(sibling.group, []).append(sibling)
    return tuple(
        Group(
            id=name,
            problem=members[0].problem,
            question=members[0].question,
            ground_truth=members[0].ground_truth,
            signal=_has_signal(members),
            siblings=tuple(members),
        )
        for name, members in by_group.items()
    )


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
            policy_version=turn.policy_version if version_known else None,
            context=view,
            condensation=turn.condensation,
            messages=tuple(turn.context),
            reply=turn.reply.content,
            calls=turn.reply.tool_calls,
            observations=turn.observations,
            turn_rewards=turn.turn_rewards,
            tool_attempts=turn.tool_attempts,
            tool_successes=turn.tool_successes,
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

    def __init__(self, step: InspectedStep) -> None:
        from tokenizers import Tokenizer  # compiled code: only when asked for

        self.file = next((file for file in tokenizer_files(step) if file.is_file()), None)
        self._tokenizer = Tokenizer.from_file(str(self.file)) if self.file else None

    def text(self, token: int) -> str | None:
        """The text of one token; of part of a character, the tokenizer's own name for it."""
        if self._tokenizer is None:
            return None
        plain: str = self._tokenizer.decode([token], skip_special_tokens=False)
        if plain and "\ufffd" not in plain:
            return plain
        name: str | None = self._tokenizer.id_to_token(token)
        return name

    def views(self, turn: Turn) -> tuple[TokenView, ...]:
        """The sampled tokens of a turn."""
        pairs = zip(turn.output_ids, turn.logprobs, strict=True)
        return tuple(TokenView(id=token, text=self.text(token), logprob=logprob) for token, logprob in pairs)


def _sibling(scored: ScoredTrajectory, number: int, credit: Mapping[str, Credit] | None) -> Sibling:
    trajectory, score = scored.trajectory, scored.score
    known = credit.get(trajectory.id) if credit is not None else None
    return Sibling(
        number=number,
        id=trajectory.id,
        group=trajectory.group_id,
        sample=trajectory.sample,
        problem=trajectory.problem_id,
        question=trajectory.question,
        ground_truth=trajectory.ground_truth,
        score=score.total,
        correct=score.correct,
        format=score.format_valid,
        components=score.components,
        advantages=known.advantages if known else None,
        handling=known.handling if known else None,
        turns=len(trajectory.turns),
        context=trajectory.max_context_tokens,
        output=trajectory.output_tokens,
        stop=trajectory.stop.value,
        answer=trajectory.answer,
        seconds=trajectory.seconds,
    )


def _natural(text: str) -> tuple[tuple[int, str], ...]:
    """A sort key that compares numbers in names by value: p2 before p10."""
    parts = re.split(r"([0-9]+)", text)  # text, digits, text, …
    return tuple((int(part), "") if place % 2 else (0, part) for place, part in enumerate(parts))


def _has_signal(members: Sequence[Sibling]) -> bool | None:
    """Whether an advantage is not 0. Scores do not tell: an estimator may compare contexts where scores are equal."""
    known = [sibling.advantages for sibling in members if sibling.advantages is not None]
    return any(advantage != 0 for advantages in known for advantage in advantages) if known else None
