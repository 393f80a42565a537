"""What ``inspect-trajectory`` shows, as data: read once, then drawn on a terminal or printed as JSON."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from condensegrpo.cli.context_view import ContextView, context_views
from condensegrpo.cli.filters import FIELDS, Fields
from condensegrpo.core.errors import ConfigError, DataError, RunError
from condensegrpo.core.messages import Message, ToolCall
from condensegrpo.core.trajectory import Condensation, Draft, ScoredTrajectory, Turn
from condensegrpo.storage.credit import Credit, read_credit
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trajectories import read_trajectories

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedStep:
    """The trajectories of one file and what is known about them."""

    file: Path
    run: Path | None  # the run folder that the file lies in
    number: int | None  # the step, if the file lies in a run folder
    scored: tuple[ScoredTrajectory, ...]
    credit: Mapping[str, Credit] | None  # None: there is no credit file, as after an evaluation
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sibling:
    """The figures of one trajectory."""

    id: str
    group: str
    sample: int
    problem: str
    question: str | None  # None: not known
    ground_truth: str | None  # None: not known
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
    signal: bool  # False: it does not train, its scores are all equal
    siblings: tuple[Sibling, ...]  # by sample

    @property
    def idle(self) -> str:
        """Why it does not train; empty: it may train."""
        handled = {sibling.handling for sibling in self.siblings}
        if "drop" in handled:
            return "dropped"
        if handled == {"mask"}:
            return "masked"
        return "" if self.signal else "no signal"


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
    policy_version: int
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


def open_step(path: Path, number: int | None) -> InspectedStep:
    """A step of a run folder (the last one by default), or a trajectory file.

    Raises:
        CondenseError: there is no such run, step or file, it holds nothing, or it is damaged.
    """
    if path.is_dir():
        run = RunFolder.open(path)
        return _read(_file_of(run, number), run.path)
    if number is not None:
        raise ConfigError(f"reading {path}: --step goes with a run folder; a file is one step.")
    if not path.exists():
        raise RunError(f"reading {path}: there is no such run folder or trajectory file.")
    inside = path.resolve().parent
    return _read(path, inside.parent if inside.name == "trajectories" else None)


def every_step(path: Path, number: int | None) -> tuple[InspectedStep, ...]:
    """All steps of a run folder, or the one that ``open_step`` opens; raises as that does."""
    if number is not None or not path.is_dir():
        return (open_step(path, number),)
    run = RunFolder.open(path)
    return tuple(_read(_file_of(run, step), run.path) for step in run.steps()) or (open_step(path, None),)


def siblings(step: InspectedStep) -> tuple[Sibling, ...]:
    """The figures of every trajectory, in the order of groups and samples."""
    unordered = (_sibling(scored, step.credit) for scored in step.scored)
    return tuple(sorted(unordered, key=lambda sibling: (_natural(sibling.group), sibling.sample, sibling.id)))


def groups(every: Sequence[Sibling]) -> tuple[Group, ...]:
    """The trajectories by group, in order of appearance."""
    by_group: dict[str, list[Sibling]] = {}
    for sibling in every:
        by_group.setdefault(sibling.group, []).append(sibling)
    return tuple(
        Group(id=name, problem=members[0].problem, signal=_has_signal(members), siblings=tuple(members))
        for name, members in by_group.items()
    )


def turns(
    scored: ScoredTrajectory, credit: Credit | None, *, budget: int, tokenizer: "TokenTexts | None"
) -> tuple[TurnView, ...]:
    """Every turn of a trajectory; with its tokens if there is a ``tokenizer``."""
    views = context_views(scored.trajectory, budget)
    return tuple(
        TurnView(
            turn=index,
            kind=turn.kind,
            policy_version=turn.policy_version,
            context=view,
            condensation=turn.condensation,
            messages=turn.context,
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


def budget_of(step: InspectedStep) -> int:
    """The context budget in tokens of the run if its configuration can be read, else the step's largest context."""
    config = _config_of(step)
    if config is not None:
        return config.rollout.limits.max_context_tokens
    return max((scored.trajectory.max_context_tokens for scored in step.scored), default=0)


def ranges(numbers: Sequence[int]) -> str:
    """``1–4, 6`` for 1, 2, 3, 4, 6."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


class TokenTexts:
    """The texts of token ids by the tokenizer of a run, if there is one."""

    def __init__(self, step: InspectedStep) -> None:
        from tokenizers import Tokenizer  # compiled code: only when asked for

        self.file = next((file for file in _tokenizer_files(step) if file.is_file()), None)
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


def _file_of(run: RunFolder, number: int | None) -> Path:
    steps = run.steps()
    if not steps:
        raise RunError(
            f"reading {run.path}: there are no trajectories yet. Wait for the first step, or inspect another run."
        )
    if number is not None and number not in steps:
        raise RunError(f"reading {run.path}: step {number} has no trajectories. There are steps {ranges(steps)}.")
    return run.trajectories(steps[-1] if number is None else number)


def _read(file: Path, run: Path | None) -> InspectedStep:
    result = read_trajectories(file)
    if not result.trajectories:
        raise DataError(
            f"reading {file}: it holds no trajectory{': ' + result.problems[0] if result.problems else ''}."
        )
    credit_file = RunFolder(run).credit_folder / file.name if run else None
    digits = file.stem.removeprefix("step_")
    return InspectedStep(
        file=file,
        run=run,
        number=int(digits) if run and digits.isdecimal() else None,
        scored=result.trajectories,
        credit=read_credit(credit_file) if credit_file and credit_file.is_file() else None,
        problems=result.problems,
    )


def _sibling(scored: ScoredTrajectory, credit: Mapping[str, Credit] | None) -> Sibling:
    trajectory, score = scored.trajectory, scored.score
    known = credit.get(trajectory.id) if credit is not None else None
    return Sibling(
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


def _has_signal(members: Sequence[Sibling]) -> bool:
    """By the advantages if known: an estimator may distinguish trajectories of equal score by their contexts."""
    known = [sibling.advantages for sibling in members if sibling.advantages is not None]
    if known:
        return any(advantage != 0 for advantages in known for advantage in advantages)
    return len({sibling.score for sibling in members}) > 1


def _tokenizer_files(step: InspectedStep) -> Iterator[Path]:
    """Candidates for the tokenizer of a run."""
    if step.run is None:
        return
    run = RunFolder(step.run)
    yield from sorted(run.checkpoints.glob("*/model/tokenizer.json"), reverse=True)
    yield from sorted(run.path.glob("origin/*/tokenizer.json"))
    config = _config_of(step)
    if config is not None and config.model.path is not None:
        yield Path(config.model.path) / "tokenizer.json"


def _config_of(step: InspectedStep) -> "RunConfig | None":
    """The configuration of the run; None: there is none, or it cannot be read, perhaps of an older version."""
    from condensegrpo.config.load import load_stored  # imports pydantic: only when needed

    try:
        return load_stored(RunFolder(step.run).config) if step.run is not None else None
    except ConfigError:
        return None
