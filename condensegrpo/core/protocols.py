"""The interfaces of plug-ins: what a sampler, condenser, reward, task, environment and tool are. Standard library only.

A plug-in inherits nothing from here; it has the method. Every interface has a deterministic fake or a small real
implementation in the package. The engine decides *when* a plug-in is called and names the boundary when it raises; a
plug-in raises plain Python errors.
"""

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, SupportsFloat, runtime_checkable

from condensegrpo.core.messages import Caption, History, MediaPart, Message, Summary, Unit
from condensegrpo.core.trajectory import Finish, Generation, SamplingParams, Trajectory

Split = Literal["train", "eval"]
Count = Callable[[Sequence[Message]], int]  # tokens of these messages as a whole prompt, template and tools included
# (name as in the model's state dict, torch.Tensor): Any keeps torch out of this folder
NamedTensors = Iterable[tuple[str, Any]]


class Sampler(Protocol):
    """Samples replies. Token ids in, token ids out."""

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """One reply to one prompt. Log-probabilities are those of the distribution sampled from.

        Requests that wait at the same time may be served together; the result of one must not depend on the others.
        """

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Take the learner's weights after optimiser step ``version``. No request may be under way."""

    @property
    def version(self) -> int:
        """The optimiser step whose weights are in use."""

    def close(self) -> None:
        """Free memory, processes and connections. May be called twice."""


@runtime_checkable
class HoldsModel(Protocol):
    """A condenser or reward that may load a model: every process that plays trajectories would load it once more."""

    @property
    def holds_model(self) -> bool:
        """Whether it does. By default trajectories are then played in one process, see ``rollout.workers``."""


@runtime_checkable
class Sleeps(Protocol):
    """A sampler that can give memory back while the learner works."""

    def sleep(self, *, keep_weights: bool) -> None:
        """Free memory until the next ``update_weights`` or ``sample``, which wakes the sampler by itself.

        Without ``keep_weights`` it may drop its weights, and can sample again only after ``update_weights``.
        """


@runtime_checkable
class TakesAdapters(Protocol):
    """A sampler that may take LoRA adapters under PEFT's names in ``update_weights``, beside base weights that stay."""

    @property
    def takes_adapters(self) -> bool:
        """Whether it takes the adapters alone; otherwise base and adapters merged."""


@runtime_checkable
class StagesWeights(Protocol):
    """A sampler that can prepare an update of its weights while it samples with the old ones."""

    def stage_weights(self, named_tensors: NamedTensors, version: int) -> Callable[[], None]:
        """Prepare an update; the call that it returns makes it, and no request may be under way then.

        ``update_weights`` does both. The learner's weights do not change in between.
        """


@runtime_checkable
class Describes(Protocol):
    """A sampler that chose settings by itself."""

    def describe(self) -> str:
        """The settings that it chose, as one line of the log."""


@runtime_checkable
class Measures(Protocol):
    """A sampler that can say how probable a given reply is to its model. Optional: samplers may do without."""

    async def measure(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Sequence[float]:
        """log π(output_ids[i] | prompt_ids, output_ids[:i]) for every i, (A,) nats at temperature 1."""


@runtime_checkable
class RepliesToMessages(Protocol):
    """A sampler that is given messages in place of token ids, such as a chat endpoint: one that does not train."""

    async def reply(self, messages: Sequence[Message], params: SamplingParams) -> Generation:
        """One reply, whose token ids are those of its text and have no log-probabilities."""


@runtime_checkable
class ChecksTraining(Protocol):
    """A sampler that may refuse to train. A static method: it is called before the sampler is built."""

    def check_training(self) -> None:
        """Raise ``ValueError`` if no policy can be trained with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionQuery:
    """A prompt, and the tokens whose attention to it is captured."""

    prompt_ids: tuple[int, ...]  # (P,) the prompt
    positions: tuple[int, ...] = ()  # in the prompt, whose attention counts too, such as those of the last output
    question_ids: tuple[int, ...]  # after the prompt: the question once more; at least one
    calibration_ids: tuple[int, ...]  # after the prompt, without sight of the question: no content; at least one
    layers: tuple[int, ...] = ()  # counted from 0; (): a few from the middle to near the end

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.question_ids or not self.calibration_ids:
            raise ValueError(
                f"an attention query needs a prompt, a question and a calibration: found {len(self.prompt_ids)}, "
                f"{len(self.question_ids)} and {len(self.calibration_ids)} tokens"
            )
        if not all(0 <= position < len(self.prompt_ids) for position in self.positions):
            raise ValueError(
                f"attention of the positions {self.positions} in a prompt of {len(self.prompt_ids)} tokens"
            )

    @property
    def length(self) -> int:
        """Tokens that the model reads: the prompt and both branches."""
        return len(self.prompt_ids) + len(self.question_ids) + len(self.calibration_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAttention:
    """How much attention every prompt token of an attention query gets: means over layers, heads and query tokens."""

    question: tuple[float, ...]  # (P,) half from the question, half from the ``positions`` if any; at most 1 together
    calibration: tuple[float, ...]  # (P,) from the calibration


@runtime_checkable
class Attends(Protocol):
    """A sampler that can return its model's attention. Optional: samplers may do without."""

    async def attend(self, query: AttentionQuery) -> TokenAttention:
        """The attention of one query, under the weights in use."""


class MediaStore(Protocol):
    """Where the bytes of pictures are: messages, workers, servers and files hold hashes."""

    def write(self, part: MediaPart) -> MediaPart:
        """Store the bytes of a part, if it has any; the part without them."""

    def read(self, sha256: str) -> bytes:
        """The bytes that were stored under a hash; ``DataError`` if there are none."""


class ExpandsPictures(Protocol):
    """What a picture is in a prompt: the chat template writes a placeholder, and the model's processor expands it."""

    @property
    def media(self) -> MediaStore:
        """Where the bytes of pictures are; an episode stores those of every message that it takes up."""

    @property
    def placeholder(self) -> str:
        """The token that the chat template writes for every picture."""

    @property
    def placeholder_id(self) -> int:
        """The token at whose positions the picture's embeddings are placed."""

    def expansion(self, sha256: str) -> str:
        """The text that takes the place of the placeholder; its tokens depend on the size of the picture.

        Raises ``DataError`` if the picture cannot be shown.
        """


class UnitScorer(Protocol):
    """Says how much the next turn needs each unit of a history."""

    async def score(self, histories: Sequence[History], tokens: int) -> Sequence[Sequence[float]]:
        """A number for every unit of each history: finite, not negative, the more the more the unit is needed.

        ``tokens`` is the longest prompt that may be read at once.
        """


@runtime_checkable
class RanksUnits(Protocol):
    """A condenser that ranks units by scores: it finds its scorers in ``Budget.scorers``."""

    @property
    def scorers(self) -> Sequence[str]:
        """Their names: ``policy``, ``leave_one_out``, or the folder or Hub id of a frozen model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A text that a condenser asks the policy for."""

    units: tuple[Unit, ...]  # at least one, to show after the pinned messages
    instruction: str  # shown after the last of them, see Unit.with_instruction
    max_tokens: int | None = None  # of the text; None: as many as of a reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What the policy wrote."""

    text: str  # special tokens in it are text
    finish: Finish  # a text that was cut off by length is no summary


Write = Callable[[Request], Awaitable[Written]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a condensed prompt may cost, and how to tell."""

    tokens: int  # at most, of the whole prompt by ``count``
    count: Count
    scorers: Mapping[str, UnitScorer] = field(default_factory=dict)  # by name, those of ``RanksUnits``
    write: Write | None = None  # samples a condense turn; None: the condenser is none of ``Writes``
    request_tokens: int | None = None  # at most, of the prompt of a request; None: as ``tokens``
    reply_tokens: int | None = None  # at most, of a text that is written; None: as many as the request allows
    seconds: float | None = None  # after which the engine gives the condenser up; None: never
    media: MediaStore | None = None  # with the bytes of the history's pictures; None: there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Condensed:
    """A condenser's answer: the units to show after the pinned messages, in order."""

    units: tuple[Unit, ...]
    reason: str = ""
    summary: Summary | None = None  # a new one, whose unit is among ``units``: from now on it is the history's
    captions: tuple[Caption, ...] = ()  # new ones: from now on they are the history's
    rejected: tuple[str, ...] = ()  # why texts that the policy wrote were not used; the last one written may have been


class Condenser(Protocol):
    """Rewrites a history into a shorter one: *how* to condense. Pinned messages stay, units are atomic."""

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """The units to show before the next turn, within ``budget``; the newest alone if even that does not fit."""


@runtime_checkable
class Writes(Protocol):
    """A condenser that asks the policy for text: only such a one gets ``Budget.write``."""

    @property
    def writes(self) -> int:
        """How often it may ask in one call of ``condense``, texts that it rejects included; 0: never."""


@runtime_checkable
class ChecksRoom(Protocol):
    """A condenser that needs some room, and can tell at the start of a run."""

    def check_room(self, pinned: Sequence[Message], budget: Budget) -> None:
        """Raise ``ValueError``, with what is needed, if it can never work after these pinned messages."""


@runtime_checkable
class Counted(Protocol):
    """A condenser that has something to count, such as calls of another model."""

    def counts(self) -> Mapping[str, float]:
        """What was counted since the last call, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A condenser in a pipeline, with its trigger."""

    name: str
    condenser: Condenser
    over: float = 1.0  # share of the budget that a prompt must exceed; 0: always

    def __post_init__(self) -> None:
        if isinstance(self.over, bool) or not 0 <= self.over <= 1:
            raise ValueError(f"the trigger of the stage {self.name!r} is {self.over}: wanted a share from 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One question with its ground truth."""

    id: str
    question: str
    answer: str | None = None  # ground truth
    data: Mapping[str, Any] = field(default_factory=dict)  # whatever the task's environment and rewards need


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """The history as the environment has it from now on, such as an agent that edits, drops or adds messages.

    The next prompt is rendered from it and declared as a condensation: it never continues the last one by ids.
    """

    history: History  # Unit.turn: the number of the reply among those that ``step`` was given, from 0; increasing
    by: str  # declared in place of the condenser
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An environment's answer to one reply. ``done`` with neither answer nor outcome is a format error."""

    observations: tuple[Message, ...] = ()
    done: bool = False
    answer: str | None = None
    outcome: float | None = None  # with ``done``: what the episode was worth to the environment, see reward environment
    turn_rewards: Mapping[str, float] = field(default_factory=dict)
    new_query: bool = False  # the observations ask a further question: limits per query count from here
    rewritten: Rewritten | None = None  # None: the history goes on with the reply and the observations


class Environment(Protocol):
    """One episode of one problem; used once. Replies that call tools go to the tools, all others come here.

    Code that blocks the event loop (``time.sleep``, a synchronous request) holds up every episode: put it in
    ``asyncio.to_thread``. docs/explanation/rollouts.md says what becomes of code that never returns.
    """

    async def start(self) -> tuple[Message, ...]:
        """The pinned messages of the history: system message and question."""

    async def step(self, reply: Message) -> Step:
        """What follows from a reply that called no tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a tool of an environment gave back. ``done`` ends the episode when all calls of the reply have returned."""

    text: str  # what the policy reads; shortened like any result
    media: tuple[MediaPart, ...] = ()  # shown after the text, with their bytes: ``MediaPart.of``
    done: bool = False
    answer: str | None = None
    outcome: float | None = None  # with ``done``: as in ``Step``
    turn_rewards: Mapping[str, float] = field(default_factory=dict)


async def _answered_in_step(arguments: Mapping[str, Any], history: History) -> ToolResult | str:
    raise RuntimeError("the tool has no call, and its environment is none of AnswersCalls")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentTool:
    """A tool of one episode, beside those of the run. It is called, limited and counted as they are.

    What it raises is an observation; ``EnvironmentLost`` ends the episode as ``environment_error``.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of the arguments: {"type": "object", "properties": …, "required": […]}
    # arguments; the history before the reply. Not called where the environment is one of ``AnswersCalls``
    call: Callable[[Mapping[str, Any], History], Awaitable[ToolResult | str]] = _answered_in_step

    @property
    def schema(self) -> dict[str, object]:
        """As chat templates and tool formats show it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@runtime_checkable
class OffersTools(Protocol):
    """An environment with tools of its own, which may keep a state, or a condenser whose view the policy decides.

    The tools of a condenser are offered in every episode of a run and keep nothing: they accept a call, or refuse it by
    an answer that starts with ``Error:``, and the condenser reads the accepted calls from the history.
    """

    def tools(self) -> Sequence[EnvironmentTool]:
        """The tools, by names that no tool of the run has. Those of an environment are read after ``start`` and with a
        rewritten history.
        """


@runtime_checkable
class AnswersCalls(Protocol):
    """An environment that answers tool calls itself, such as an agent with tools of its own.

    ``step`` is given every reply, with the calls that could be read in ``tool_calls``. Observations of role ``tool``
    name the call in ``tool_call_id``; they are shown in the tool format, shortened and counted like results of tools.
    """

    @property
    def stop_strings(self) -> Sequence[str]:
        """What ends the next reply, beside the stop strings of the tool format."""


@runtime_checkable
class ReadsHistory(Protocol):
    """An environment that judges the whole conversation: replies whose calls the tools answered do not come to it."""

    def read_history(self, history: History) -> None:
        """The history before the reply that ``step`` is given next; condensers leave its units as they were."""


@runtime_checkable
class ReadsFinish(Protocol):
    """An environment that passes replies on to someone who has to know whether each is whole."""

    def read_finish(self, finish: Finish) -> None:
        """Why the reply ended that ``step`` is given next. By default one that was cut off ends the episode instead."""


@runtime_checkable
class Closes(Protocol):
    """An environment that holds something: a process, a file, a connection."""

    async def close(self) -> None:
        """Free it. Called once, however the episode ended: after ``start`` raised and when it was cancelled too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One turn as it should be done, for the warm start: a context and the reply to it."""

    context: tuple[Message, ...]
    reply: str  # without the stop token, which the renderer adds
    problem: Problem | None = None  # the training problem that it is a turn of; None: not known


class Task(Protocol):
    """Problems and the environments that pose them."""

    def problems(self, split: Split) -> Sequence[Problem]:
        """All problems of a split, in a fixed order. The splits share no problem."""

    def environment(self, problem: Problem) -> Environment:
        """A fresh episode."""


class Expert(Protocol):
    """Writes the texts of one episode as they should be, in the order of the episode. Used once."""

    def reply(self, context: Sequence[Message]) -> str | None:
        """The reply to what the policy would be shown, without the stop token, which the renderer adds.

        ``None`` gives the problem up: none of its turns is shown.
        """

    def write(self, request: Request) -> str:
        """The text that a condenser asks for, likewise."""


@runtime_checkable
class HasExpert(Protocol):
    """A task that can play: the warm start shows its turns in the contexts of the run's condenser."""

    def expert(self, problem: Problem) -> Expert:
        """The expert of an episode of a training problem. Of one problem it always plays the same."""


@runtime_checkable
class HasCorpus(Protocol):
    """A task that knows its words."""

    def corpus(self) -> Iterable[str]:
        """Texts that hold every word of the task, what the policy writes included, to build a tokenizer from."""


@runtime_checkable
class JudgesReplies(Protocol):
    """A task that says more of a sampled reply than whether it is its expert's word for word."""

    def sound(self, context: tuple[Message, ...], reply: str) -> bool | None:
        """Whether a sampled reply is right for this context; ``None``: it commits to nothing that can be judged.

        A context may end with the request of a condenser, see ``Unit.with_instruction``.
        """


@runtime_checkable
class Demonstrates(JudgesReplies, Protocol):
    """A task that can show how it is done in contexts that it makes itself, whatever the run's condenser shows."""

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """Turns of training problems, without end, in an order fixed by ``seed``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """A reward with its parts. ``None`` leaves the judgement to the plain rule of ``scoring.score``."""

    total: float  # of the outcome; turn rewards are not in it
    components: Mapping[str, float] = field(default_factory=dict)
    format_valid: bool | None = None
    correct: float | None = None  # in [0, 1]
    turn_rewards: tuple[float, ...] = ()  # (K,) what single turns are paid besides; () none

    @classmethod
    def of(cls, given: object) -> "RewardResult":
        """What a reward gave, in plain floats: a mapping is the sum of it, ``format`` and ``correct`` judge.

        {"correct": 1, "format": 0, "brevity": 0.2}   ─▶   total 1.2, correct 1.0, format_valid False
        """
        if isinstance(given, RewardResult):
            return cls(
                total=_number("total", given.total),
                components={name: _number(name, value) for name, value in given.components.items()},
                format_valid=given.format_valid,
                correct=None if given.correct is None else _number("correct", given.correct),
                turn_rewards=tuple(_number("a turn reward", value) for value in given.turn_rewards),
            )
        if not isinstance(given, Mapping):
            cure = ""
            if isinstance(given, Coroutine):
                given.close()
                cure = " Define it with def: it is a coroutine."
            raise TypeError(
                f'returned {given!r:.80}, wanted numbers by name, as in return {{"brief": 1.0}}, or a '
                f"RewardResult.{cure}"
            )
        parts = {name: _number(name, value) for name, value in given.items()}
        return cls(
            total=sum(parts.values()),  # not fsum, which raises on inf − inf before the value can be named
            components=parts,
            format_valid=bool(parts["format"]) if "format" in parts else None,
            correct=parts.get("correct"),
        )


def _number(name: str, value: object) -> float:
    if not isinstance(value, SupportsFloat):
        raise TypeError(f'returned {name} = {value!r:.80}, wanted a number, as in return {{"brief": 1.0}}')
    return float(value)


class Reward(Protocol):
    """What the outcome of a finished trajectory is worth: R^O. Several threads may call it at once."""

    def __call__(self, trajectory: Trajectory, problem: Problem) -> Mapping[str, float] | RewardResult:
        """The reward, or its parts by name (their sum is then the reward)."""


@runtime_checkable
class GroupReward(Protocol):
    """What finished trajectories are worth beside their siblings. The engine waits for the last one of a group."""

    def score_group(
        self, trajectories: Sequence[Trajectory], problem: Problem
    ) -> Sequence[Mapping[str, float] | RewardResult]:
        """The reward of every trajectory of one group, failed ones included, in the order given: by sample number."""


@runtime_checkable
class TurnReward(Protocol):
    """What the single turns of a finished trajectory are worth: its part of R^T. It says nothing of the outcome."""

    def turn_rewards(self, trajectory: Trajectory, problem: Problem) -> Sequence[float]:
        """One number a turn."""


Tool = Callable[..., object]  # a typed function with a docstring, sync or async; what it returns is shown as str(...)
