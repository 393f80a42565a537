"""Stand-ins of a run's parts: task, environment, tools, reward and policy, with the lengths and times of a workload.

Their texts are in a tokenizer of their own, in which a character of a filler is a token: only numbers of tokens count.
Texts differ as those of a run do, so that prefixes are shared where they would be: by the prompts of a problem, and by
the turns of a trajectory.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from random import Random
from typing import TypeVar

from transformers import PreTrainedTokenizerFast

from condensegrpo.core.errors import ConfigError
from condensegrpo.core.messages import Message, ToolCall
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.core.protocols.task import Problem, Split
from condensegrpo.core.trajectory import Finish, Generation, SamplingParams, Trajectory
from condensegrpo.episodes.toolformats import Native, Tagged, ToolFormat
from condensegrpo.learner.new_model import ROLES, new_tokenizer
from condensegrpo.simulation.cluster import Workload

FILLER = " ZZZZZZZ"  # a token a character: no pair of them is in the corpus, and long words are cheap to tokenise
END_OF_INPUT = " ###"  # ends every text that a reply follows
ANSWER = "<answer>1</answer>"
NUMBER = "0" * 8  # in the text of a call, in place of the reply's own number: what a tool takes depends on it alone
INPUT_TAIL = 64  # tokens that may follow END_OF_INPUT in a prompt for a reply: tags, a meter, the chat template
VOCABULARY = 1024
T = TypeVar("T")
Lengths = Sequence[int]  # of the replies of an episode, in tokens


def stand_in_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer for fillers, numbers and ``texts``."""
    corpus = [*texts, *ROLES, ANSWER, END_OF_INPUT * 4]
    return new_tokenizer(corpus * 4, kind="bpe", vocab_size=VOCABULARY)


def call_text(form: ToolFormat, tool: str) -> str:
    """A call of a stand-in tool in a tool format.

    Raises:
        ConfigError: the format is not one of the package's.
    """
    if isinstance(form, Native | Tagged):
        return form.call(tool, {"text": NUMBER})
    text = f"{form.opening}{NUMBER}{form.opening.replace('<', '</', 1)}"
    if not any(isinstance(call, ToolCall) for call in form.parse(text)):
        raise ConfigError(
            f"checking rollout.tools.format: the stand-in for the policy cannot write calls of {type(form).__name__}. "
            f"Use native, tagged or code."
        )
    return text


def stand_in_tool(name: str, workload: Workload, seed: int) -> Callable[..., object]:
    """An asynchronous tool whose duration and length of result depend on seed and argument."""

    async def tool(text: str = "", code: str = "") -> str:
        """Stand-in of a tool.

        Args:
            text: the number of the call.
            code: the same, where calls are code.
        """
        random = Random(f"tool {seed} {name} {text or code}")
        await asyncio.sleep(workload.tool_seconds.draw(random))
        return filled(round(workload.result_tokens.draw(random)))

    tool.__name__ = tool.__qualname__ = name
    return tool


def filled(tokens: int) -> str:
    """A text of about so many tokens that a reply follows."""
    return "".join(_repeated(FILLER, max(tokens - 1, 1))) + END_OF_INPUT


def _repeated(part: Sequence[T], length: int) -> Sequence[T]:
    return tuple(islice(cycle(part), length))


@dataclass(slots=True, kw_only=True)
class StandInEnvironment:
    """Ends with an answer; what it says to any other reply takes the time of a tool and has its length."""

    problem: Problem
    workload: Workload
    steps: int = 0

    async def start(self) -> tuple[Message, ...]:
        """The question."""
        return (Message(role="user", content=self.problem.question),)

    async def step(self, reply: Message) -> Step:
        """The end, or the next observation."""
        if ANSWER in reply.text:
            return Step(done=True, answer="1")
        self.steps += 1
        random = Random(f"environment {self.problem.id} {self.steps} {reply.text[:24]}")
        await asyncio.sleep(self.workload.tool_seconds.draw(random))
        text = filled(round(self.workload.result_tokens.draw(random)))
        return Step(observations=(Message(role="user", content=text),))


@dataclass(frozen=True, slots=True, kw_only=True)
class StandInTask:
    """Questions that differ in a number."""

    workload: Workload
    count: int

    def problems(self, split: Split) -> Sequence[Problem]:
        """All problems."""
        text = filled(self.workload.question_tokens - 8)
        ids = (f"{split}{index:08}" for index in range(self.count))
        return [Problem(id=name, question=name + text, answer="1") for name in ids]

    def environment(self, problem: Problem) -> Environment:
        """A fresh episode."""
        return StandInEnvironment(problem=problem, workload=self.workload)


@dataclass(frozen=True, slots=True, kw_only=True)
class StandInReward:
    """Right with a probability, by the name of the trajectory."""

    correct: float
    seed: int

    def __call__(self, trajectory: Trajectory, problem: Problem) -> dict[str, float]:
        """1 or 0."""
        del problem
        return {"correct": float(Random(f"reward {self.seed} {trajectory.id}").random() < self.correct)}


@dataclass(kw_only=True, eq=False)
class StandInPolicy:
    """Writes replies of drawn or recorded lengths: a number of its own, fillers, then a call or the answer."""

    tokenizer: PreTrainedTokenizerFast
    workload: Workload
    call: str  # as ``call_text``
    max_turns: int
    seed: int
    recorded: Sequence[Lengths] = ()  # of the episodes to draw from; (): by the distributions
    _replies: dict[str, list[int]] = field(default_factory=dict)  # of each trajectory: the seeds of its replies so far

    def __post_init__(self) -> None:
        self._filler, (self._mark,) = self._ids(FILLER), self._ids(END_OF_INPUT)
        self._digits = [self._ids(str(digit))[0] for digit in range(10)]
        self._answer = self._ids(ANSWER)
        before, _, after = self.call.partition(NUMBER)
        self._call = self._ids(before), self._ids(after)

    def __call__(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """The next reply of the trajectory, or a text that a condenser asks for; of one seed always the same."""
        random = Random(params.seed)
        if self._mark not in prompt_ids[-INPUT_TAIL:]:  # it ends with a condenser's instruction
            return self._written(random, round(self.workload.summary_tokens.draw(random)), params)
        seeds = self._replies.setdefault(params.trajectory, [])
        if params.seed not in seeds:  # else it is asked for again, of another server
            seeds.append(params.seed)
        lengths, number = self._lengths(params.trajectory), seeds.index(params.seed)
        last = number + 1 >= len(lengths)
        return self._written(random, lengths[-1 if last else number], params, answers=last, calls=not last)

    def ends_with(self, generation: Generation) -> bool:
        """Whether a reply is the last one of its trajectory."""
        answers = generation.token_ids[-1 - len(self._answer) : -1] == self._answer
        return answers or generation.finish is Finish.LENGTH

    def _lengths(self, trajectory: str) -> Lengths:
        random = Random(f"lengths {self.seed} {trajectory}")
        if self.recorded:
            return random.choice(self.recorded)
        turns = self.workload.turns
        count = self.max_turns if turns is None else min(max(1, round(turns.draw(random))), self.max_turns)
        return [round(self.workload.reply_tokens.draw(random)) for _ in range(count)]

    def _written(
        self, random: Random, length: int, params: SamplingParams, *, answers: bool = False, calls: bool = False
    ) -> Generation:
        number = [self._digits[random.randrange(10)] for _ in range(8)]
        before, after = self._call
        end = self._answer if answers else (*before, *number, *after) if calls and self.call else ()
        fillers = max(length - len(number) - len(end) - 1, 0)
        ids = (*number, *_repeated(self._filler, fillers), *end, params.stop_ids[0])[: params.max_tokens]
        finish = Finish.STOP if ids[-1] == params.stop_ids[0] else Finish.LENGTH
        return Generation(token_ids=ids, logprobs=(-0.5,) * len(ids), finish=finish)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))
