"""The data of a run, from sampled turn to training row. Standard library only.

Every value is frozen; a later stage makes a new value and fills nothing in. ``None`` means "not known", never "zero".

    Turn, Turn, … ─▶ Trajectory ─▶ ScoredTrajectory ─▶ Segment, Segment, …
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Self

from condensegrpo.core.failures import PluginFailure
from condensegrpo.core.messages import Message
from condensegrpo.core.shared_sequence import common_prefix, shared

MAX_REWARD = 1e100  # magnitude of a reward: squared differences, summed over a group, stay far from 1e308


class FinishReason(StrEnum):
    """Why a sampler stopped."""

    STOP = "stop"  # a stop id was sampled (it is the last output id) or a stop string was completed
    LENGTH = "length"  # max_tokens were sampled
    ABORT = "abort"  # the request was cancelled


class StopReason(StrEnum):
    """Why a trajectory ended."""

    ANSWERED = "answered"  # the policy gave its answer
    FINISHED = "finished"  # the environment ended the episode with an outcome, without an answer in text
    CONFIDENT = "confident"  # it was sure of the answer that it drafted, which was taken (rollout.stop_when_confident)
    TURN_LIMIT = "turn_limit"  # max_turns replies were sampled without an answer
    CONTEXT_OVERFLOW = "context_overflow"  # the condensed prompt does not fit the budget
    OUTPUT_LENGTH = "output_length"  # a reply was cut off at max_output_tokens
    FORMAT = "format"  # the environment could not read a reply
    ENVIRONMENT_ERROR = "environment_error"  # the task, its environment or the condenser raised or timed out
    SAMPLER_ERROR = "sampler_error"  # the sampler raised or timed out
    REWARD_ERROR = "reward_error"  # the reward raised, timed out or returned something that is no reward
    ABORTED = "aborted"  # the sampler gave the reply up

    @property
    def gives_answer(self) -> bool:
        """Whether a trajectory that ended so has an answer; no other has one."""
        return self in (StopReason.ANSWERED, StopReason.CONFIDENT)


Handling = Literal["train", "mask", "penalise"]  # what training makes of a trajectory, by its stop


class SpanStatus(StrEnum):
    """The effect of a condenser on one unit."""

    KEPT = "kept"  # verbatim
    DROPPED = "dropped"  # gone
    REWRITTEN = "rewritten"  # replaced by a shorter text, such as a placeholder


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one reply."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy; the log-probabilities are then those at temperature 1
    seed: int = 0  # of the random stream of this reply
    stop_ids: tuple[int, ...] = ()  # sampling one of these ends the reply; it stays the last output id
    stop_strings: tuple[str, ...] = ()  # the token that completes one of these ends the reply and is kept whole
    trajectory: str = ""  # whose reply it is: a sampler of several engines may keep its prefix in one; changes no reply
    media: tuple[str, ...] = ()  # the hashes of the pictures in the prompt, in order; their bytes are in a MediaStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a sampler returns."""

    token_ids: tuple[int, ...]  # (A,) as sampled, the stop id included
    # (A,) nats, under the distribution sampled from (temperature applied); (): not known, the ids are those of its text
    logprobs: tuple[float, ...]
    finish: FinishReason

    def __post_init__(self) -> None:
        if self.logprobs and len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"a generation needs one logprob a token: {len(self.token_ids)} tokens, {len(self.logprobs)} logprobs"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The status of consecutive units of the history."""

    first: int  # Unit.turn of the first
    last: int  # Unit.turn of the last
    units: int  # how many
    status: SpanStatus  # of each
    tokens: int  # of all, before condensing

    @property
    def turns(self) -> range:
        """From the first to the last unit, turns between them that made no unit included."""
        return range(self.first, self.last + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condensation:
    """The declaration that a prompt was rewritten and does not continue the last one."""

    condenser: str
    reason: str
    tokens_before: int  # of the whole prompt, template included; from a condenser: pinned messages + sum of spans
    tokens_after: int  # of the prompt as sampled from
    spans: tuple[Span, ...]  # every unit of the history in order, neighbours of one status together


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What the policy would answer to a prompt, sampled before it acts."""

    text: str  # after the opening of an answer, which was part of the prompt
    tokens: int  # sampled
    probability: float  # of the whole text, in [0, 1], under the distribution sampled from


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One call of the policy: the tokens that it was given and the tokens that it sampled."""

    prompt_ids: Sequence[int]  # (P,) exactly what the sampler was given; immutable, in a rollout a SharedSequence
    output_ids: tuple[int, ...]  # (A,) exactly what it returned
    logprobs: tuple[float, ...]  # (A,) nats, under the distribution sampled from; (): not known, see ``is_text``
    policy_version: int  # optimiser steps taken when this turn was sampled
    kind: Literal["act", "condense"] = "act"  # condense: it wrote a text that a condenser asked for and used
    frozen: bool = False  # another model than the policy wrote it (rollout.condense.writer): it never trains
    condensation: Condensation | None = None
    context: Sequence[Message]  # the messages that prompt_ids render; immutable
    reply: Message
    observations: tuple[Message, ...] = ()
    turn_rewards: Mapping[str, float] = field(default_factory=dict)  # by name, from the environment
    tool_attempts: int = 0  # tool calls in the reply, malformed ones included
    tool_successes: int = 0  # of these, calls whose result is neither blank nor an error text ("Error: …")
    tools_abandoned: int = 0  # of these, calls that exceeded their time limit
    # seconds that its tools or the environment's step took; None: not known, or neither saw the reply
    tool_seconds: float | None = field(default=None, compare=False)
    answer_logprob: float | None = None  # nats, log π(ground truth | prompt); None: not measured
    draft: Draft | None = None  # of the answer, at this prompt; taken if the trajectory stopped as confident here
    media: tuple[str, ...] = ()  # the hashes of the media in prompt_ids, in order: their placeholder ids are all equal
    picture_starts: tuple[int, ...] = ()  # index in prompt_ids of the first token of each of the media
    picture_tokens: int = 0  # of prompt_ids, those that stand for pictures

    def __post_init__(self) -> None:
        if self.logprobs and len(self.output_ids) != len(self.logprobs):
            raise ValueError(
                f"a turn needs one logprob a token: {len(self.output_ids)} tokens, {len(self.logprobs)} logprobs"
            )
        if not self.prompt_ids:
            raise ValueError("a turn needs a prompt of at least one token")
        if not 0 <= self.tool_successes <= self.tool_attempts:
            raise ValueError(f"{self.tool_successes} of {self.tool_attempts} tool calls cannot have succeeded")

    @property
    def is_text(self) -> bool:
        """Whether the sampler returned a text: the ids are those of the run's tokenizer, maybe not the sampled ones."""
        return bool(self.output_ids) and not self.logprobs

    def cached_ids(self, last: Self) -> int:
        """How many ids its prompt begins with as that of another turn; with another picture an id is another one."""
        alike = common_prefix(last.media, self.media)
        starts = self.picture_starts[alike : alike + 1] if alike < len(last.media) else ()
        return min([common_prefix(last.prompt_ids, self.prompt_ids), *starts])

    def added_ids(self, last: Self) -> tuple[int, ...] | None:
        """What the prompt adds to another turn's prompt and output; None: it does not continue them.

        Two different pictures with equal placeholder ids are no continuation.
        """
        if self.media[: len(last.media)] != last.media:
            return None
        start, end = len(last.prompt_ids), len(last.prompt_ids) + len(last.output_ids)
        if shared(self.prompt_ids).continues(last.prompt_ids) and tuple(self.prompt_ids[start:end]) == last.output_ids:
            return tuple(self.prompt_ids[end:])
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A text that the policy wrote for a condenser and that was not used: no turn, and it trains nothing."""

    before: int  # index of the turn that it was written for; the number of turns if none followed
    prompt_ids: Sequence[int]  # (P,)
    output_ids: tuple[int, ...]  # (A,)
    policy_version: int
    text: str
    reason: str  # why it was not used


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One episode, [(c_1, o_1), …, (c_k, o_k)]. It may have no turn at all if nothing could be sampled."""

    id: str  # step/problem/sample, such as 6/12/3
    problem_id: str
    group_id: str  # step/problem: the number of a problem counts those of a batch, from 0
    sample: int  # its number in its group, from 0
    question: str | None = None  # of the problem; None: not known
    ground_truth: str | None = None  # the answer of the problem; None: not known
    turns: tuple[Turn, ...]
    stop: StopReason
    answer: str | None  # read from the assistant's text only; None: none was given
    outcome: float | None = None  # that the environment gave, which the reward ``environment`` pays; None: it gave none
    seconds: float
    detail: str = ""  # what went wrong, for stops that are failures
    failure: PluginFailure | None = None  # of a plug-in; None: none failed
    rejected: tuple[Rejected, ...] = ()  # in the order in which they were written

    @property
    def replies(self) -> int:
        """Turns in which the policy acted; the others wrote for a condenser."""
        return sum(turn.kind == "act" for turn in self.turns)

    @property
    def max_context_tokens(self) -> int:
        """The largest prompt of any turn, in tokens; 0 without turns."""
        return max((len(turn.prompt_ids) for turn in self.turns), default=0)

    @property
    def output_tokens(self) -> int:
        """Sampled tokens of all turns."""
        return sum(len(turn.output_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a trajectory is worth, with the parts that it is made of."""

    total: float  # R^O: what the outcome is worth; turn rewards are not in it
    components: Mapping[str, float]  # by name; that of a turn reward is its sum over the turns
    format_valid: bool
    correct: float  # in [0, 1]
    context_tokens: int  # the largest context of any turn
    turn_rewards: tuple[float, ...] = ()  # (K,) what reward functions pay single turns; () none
    judged: bool = True  # False: no reward saw the trajectory, and ``total`` and ``correct`` say nothing

    def __post_init__(self) -> None:
        turns = {f"turn_rewards[{turn}]": value for turn, value in enumerate(self.turn_rewards)}
        for name, value in {**self.components, "total": self.total, "correct": self.correct, **turns}.items():
            if not abs(value) <= MAX_REWARD:  # NaN included
                raise ValueError(f"{name} is {value}, wanted a finite number of magnitude {MAX_REWARD:g} at most")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTurn:
    """The tokens that one turn samples in a row of training data: A in a row, with one advantage and weight."""

    turn: int  # its index in the trajectory
    start: int  # the position of its first sampled token in the row
    logprobs: tuple[float, ...]  # (A,) nats, of the sampler
    advantage: float
    weight: float  # of each token's loss in the optimiser step
    kl_weight: float | None = None  # of each token's KL term; None: the same as weight

    @property
    def positions(self) -> range:
        """The positions of its sampled tokens in the row."""
        return range(self.start, self.start + len(self.logprobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One row of training data: a maximal run of turns in which each prompt continues the last.

    Every token that no turn sampled is context: it has no loss.
    """

    token_ids: tuple[int, ...]  # (L,)
    turns: tuple[TrainedTurn, ...]  # in order; a turn that sampled nothing is none of them
    trajectory: str  # Trajectory.id
    first_turn: int
    media: tuple[str, ...] = ()  # the hashes of the media in its tokens, in order

    def __post_init__(self) -> None:
        end = 0
        for turn in self.turns:
            if turn.start < end or turn.positions.stop > len(self.token_ids):
                raise ValueError(
                    f"turn {turn.turn} of a segment samples the positions {turn.positions}, wanted positions "
                    f"in a row of {len(self.token_ids)} tokens that follow those of the turn before, ending at {end}"
                )
            end = turn.positions.stop

    @property
    def trained(self) -> int:
        """How many of its tokens the policy chose."""
        return sum(len(turn.logprobs) for turn in self.turns)
