"""A talkative little world for the trajectory engine's tests: a real tokenizer, an environment that counts, agents.

Every byte is a token of its own, and a few words have one as well: so any text can be said, and in more than one way.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from formats import TOOL_FORMATS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from condensegrpo.condensers.whole_units import Full
from condensegrpo.core.condenser import Condenser
from condensegrpo.core.messages import Message, bare
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.protocols.tool import Tool
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.episode import run_episode
from condensegrpo.episodes.render import Renderer
from condensegrpo.episodes.settings import CondenseSettings, Limits, ToolLimits
from condensegrpo.episodes.toolcalls import Toolbox
from condensegrpo.samplers.scripted import ScriptedSampler

CHATML = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
).replace("\n", "{{ '\\n' }}")
FORGETS_THINKING = CHATML.replace(  # as Qwen3: replies before the newest user message lose their thoughts
    "{{ message.content }}",
    "{{ message.content.split('</think>')[-1] if message.role == 'assistant' and not loop.last else message.content }}",
)


@cache
def tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("l", "l"), ("h", "e"), ("he", "ll"), ("hell", "o"), ("o", "n"), ("on", "e")]
    words = [*pieces, *(left + right for left, right in merges)]
    bpe = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", chat_template=template)


def save_model(folder: Path) -> None:
    """A model of one layer with this tokenizer, for contexts of up to 9,000 tokens."""
    shape = Qwen3Config(
        vocab_size=len(tokenizer()),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=9000,
    )
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def said(text: str) -> list[int]:
    """The ids of a text in the tokenizer's own split, the end of a turn included."""
    return [*tokenizer().encode(text, add_special_tokens=False), END]


def spelled(text: str) -> list[int]:
    """The same text byte by byte: a split that the tokenizer itself never makes."""
    return [piece for letter in text for piece in tokenizer().encode(letter, add_special_tokens=False)] + [END]


def shown(prompt_ids: Sequence[int]) -> str:
    return str(tokenizer().decode(list(prompt_ids), skip_special_tokens=False))


END = int(tokenizer().convert_tokens_to_ids("<|im_end|>"))


def agent(reply: Callable[[str], str], *, ids: Callable[[str], list[int]] = said) -> ScriptedSampler:
    """A sampler that says what a function of the prompt's text returns."""
    return ScriptedSampler(lambda prompt_ids: ids(reply(shown(prompt_ids))))


def last_count(prompt: str) -> int:
    """The number in the newest ``seen n`` of a prompt; 0 before the first."""
    return int(prompt.rpartition("seen ")[2].partition("<")[0]) if "seen " in prompt else 0


def counting(prompt: str) -> str:
    """Replies ``hello n`` until five observations were seen."""
    count = last_count(prompt)
    return f"answer {count}" if count == 5 else f"hello {count}"


class Counting:
    """Answers the nth reply with ``seen n``; ``answer …`` ends the episode, ``gibberish`` cannot be read."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.replies: list[str] = []

    async def start(self) -> tuple[Message, ...]:
        return (Message(role="system", content="be brief"), Message(role="user", content=self.problem.question))

    async def step(self, reply: Message) -> Step:
        self.replies.append(reply.content)
        if reply.content.startswith("answer "):
            return Step(done=True, answer=reply.content.removeprefix("answer "), turn_rewards={"brief": 0.5})
        if reply.content == "gibberish":
            return Step(done=True)
        return Step(observations=(Message(role="user", content=f"seen {len(self.replies)}"),))


def problem(number: int = 0, question: str = "count") -> Problem:
    return Problem(id=f"p{number}", question=question)


async def ignore(_: Trajectory) -> None:
    """For a rollout whose trajectories nobody waits for."""


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one number.
        b: another.
    """
    return a + b


def engine(
    sampler: Sampler,
    *,
    condenser: Condenser | None = None,
    condense_when: Literal["every_turn", "over_budget"] = "every_turn",
    trigger: CondenseSettings | None = None,
    tools: Mapping[str, Tool] | None = None,
    template: str = CHATML,
    tool_seconds: float = 60.0,
    max_tool_turns: int | None = None,
    max_tool_turns_per_query: int | None = None,
    **limits: Any,
) -> Engine:
    return Engine(
        sampler=sampler,
        renderer=Renderer(tokenizer(template)),
        condenser=condenser if condenser is not None else Full(),
        condenser_name="chosen",
        condense=trigger if trigger is not None else CondenseSettings(when=condense_when),
        toolbox=Toolbox(
            tools or {},
            format=TOOL_FORMATS["tagged"],
            limits=ToolLimits(
                seconds=tool_seconds, max_turns=max_tool_turns, max_turns_per_query=max_tool_turns_per_query
            ),
        ),
        limits=Limits(
            **{"max_turns": 8, "max_context_tokens": 1000, "max_output_tokens": 80, "turn_seconds": 60.0, **limits}
        ),
    )


T = TypeVar("T")


class JumpingSelector(selectors.DefaultSelector):
    """A selector that never waits: it advances the clock of its loop instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop with simulated time."""

    def __init__(self) -> None:
        self._jumping = JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def simulated(work: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run``, on a clock that jumps from timer to timer: no limit is exceeded because a machine is slow.

    Plug-ins run in their threads and within their limits, as in a run.
    Not for synchronous tools, rewards and models: the clock does not wait for a thread.
    """
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(work)


async def all_tasks_end() -> None:
    """Wait until the caller's task is the only one of its loop."""
    async with asyncio.timeout(30):
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.01)


EnvironmentOf = Callable[[Problem], Environment]


async def play_one(parts: Engine, problem: Problem, environment: EnvironmentOf, *, sample: int = 0) -> Trajectory:
    """One episode."""
    return await run_episode(
        problem, environment=environment, engine=parts, group_id=problem.id, sample=sample, seed=int
    )


def play_all(
    parts: Engine,
    problems: Sequence[Problem],
    environment: EnvironmentOf,
    run_loop: Callable[[Coroutine[Any, Any, list[Trajectory]]], list[Trajectory]] = asyncio.run,
) -> list[Trajectory]:
    """An episode of each problem, all at the same time."""

    async def episodes() -> list[Trajectory]:
        return await asyncio.gather(*(play_one(parts, problem, environment) for problem in problems))

    return run_loop(episodes())


def results(trajectory: Trajectory) -> list[str]:
    """What the first call of every turn returned, or what the environment said."""
    return [bare(turn.observations[0]) for turn in trajectory.turns if turn.observations]
