"""What the rollout benchmark plays: readings that are answered at length, by a policy whose replies have set lengths.

    head ─▶ reply (L words) ─▶ reading (N words) ─▶ reply ─▶ reading ─▶ … K replies, then the episode is over

Words are tokens. The policy has random weights: what it says is noise, and how long it is, is all that matters.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from passes import ModelSize

from condensegrpo.condensers.whole_units import Full
from condensegrpo.core.condenser import Condenser
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.core.protocols.sampler import NamedTensors, Sampler
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.shared_sequence import common_prefix
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams, Trajectory
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.group import problem_groups, rollout_groups
from condensegrpo.episodes.render import Renderer
from condensegrpo.episodes.settings import Limits, ToolLimits
from condensegrpo.episodes.toolcalls import Toolbox
from condensegrpo.episodes.toolformats import Native
from condensegrpo.learner.model_folder import load_tokenizer
from condensegrpo.learner.new_model import new_model, new_tokenizer, save_new
from condensegrpo.learner.settings import NewModel
from condensegrpo.samplers.scripted import ScriptedSampler

WORDS = tuple(f"w{number}" for number in range(2000))
NO_LIMIT = 1_000_000  # seconds, tokens: more than a benchmark ever needs


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """How much is said, and how long it takes to be answered."""

    trajectories: int
    turns: int  # K, replies of a trajectory
    reply: tuple[int, int]  # L, tokens of a reply: from, to
    samples: int = 1  # trajectories of a question
    spread: float = 0.0  # σ of log-normal lengths whose median is the first of ``reply``; 0: even ones, from and to
    reading: int = 40  # N, words of an answer to a reply
    question: int = 32  # words
    latency: float = 0.0  # seconds, median of what the environment takes for an answer; log-normal, σ = 0.5
    seed: int = 0

    def lengths(self) -> list[list[int]]:
        """Tokens of every reply of every trajectory."""
        draw, (least, most) = random.Random(f"lengths-{self.seed}"), self.reply
        return [
            [
                max(round(least * draw.lognormvariate(0, self.spread)), 1) if self.spread else draw.randint(least, most)
                for _ in range(self.turns)
            ]
            for _ in range(self.trajectories)
        ]

    def questions(self) -> list[str]:
        """One for every ``samples`` trajectories."""
        draw = random.Random(f"questions-{self.seed}")
        return [" ".join(draw.choices(WORDS, k=self.question)) for _ in range(0, self.trajectories, self.samples)]

    def problems(self) -> list[Problem]:
        """Those of ``questions``."""
        return [Problem(id=str(number), question=text) for number, text in enumerate(self.questions())]

    def pace(self, problem: str) -> list[float]:
        """The latencies of a problem's turns, in seconds."""
        draw = random.Random(f"latencies-{self.seed}-{problem}")
        return [self.latency * draw.lognormvariate(0, 0.5) for _ in range(self.turns)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of the policy."""

    hidden: int = 256
    layers: int = 6
    heads: int = 4
    positions: int = 8192

    @property
    def model(self) -> ModelSize:
        """Of the model that ``make_model`` writes."""
        return ModelSize(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.heads,
            head=self.hidden // self.heads,
            ffn=4 * self.hidden,
            vocabulary=len(WORDS),  # and a few special tokens
        )


class Readings(Environment):
    """The environment."""

    def __init__(self, world: World, problem: Problem, barrier: asyncio.Barrier | None = None) -> None:
        self._world, self._barrier = world, barrier
        self._draw, self._question = random.Random(problem.id), problem.question
        self._pace, self._left = iter(world.pace(problem.id) if world.latency else ()), world.turns

    async def start(self) -> tuple[Message, ...]:
        """The question."""
        return (Message(role="user", content=self._question),)

    async def step(self, reply: Message) -> Step:
        """A reading, or the end. With a barrier, once every trajectory has come as far."""
        for pace in islice(self._pace, 1):
            await asyncio.sleep(pace)
        if self._barrier is not None:
            await self._barrier.wait()
        self._left -= 1
        if not self._left:
            return Step(done=True, answer="")
        words = " ".join(self._draw.choices(WORDS, k=self._world.reading))
        return Step(observations=(Message(role="user", content=words),))


class SetLengths:
    """A sampler whose replies end after as many tokens as the world says, and for no other reason."""

    def __init__(self, sampler: Sampler, world: World) -> None:
        self._sampler = sampler
        self._world = world
        self._lengths = world.lengths()
        self._sampled: Counter[str] = Counter()  # replies by trajectory

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """A reply of its length."""
        *_, question, sample = params.trajectory.split("/")
        turn = self._sampled[params.trajectory] % self._world.turns  # they are played again and again
        self._sampled[params.trajectory] += 1
        length = self._lengths[int(question) * self._world.samples + int(sample)][turn]
        generation = await self._sampler.sample(
            prompt_ids, replace(params, max_tokens=length, stop_ids=(), stop_strings=())
        )
        return replace(generation, finish=FinishReason.STOP)

    def update(self, named_tensors: NamedTensors, version: int) -> None:
        """As the sampler inside."""
        self._sampler.update(named_tensors, version)

    @property
    def version(self) -> int:
        """As the sampler inside."""
        return self._sampler.version

    def close(self) -> None:
        """As the sampler inside."""
        self._sampler.close()


def make_model(folder: Path, size: Size) -> None:
    """Write a Qwen3 with random weights and a tokenizer of one token a word."""
    tokenizer = new_tokenizer([" ".join(WORDS)], kind="words", vocab_size=len(WORDS) + 16)
    new = NewModel(
        hidden_size=size.hidden,
        layers=size.layers,
        heads=size.heads,
        ffn_size=4 * size.hidden,
        initializer_range=0.02,
        max_positions=size.positions,
    )
    model = new_model(tokenizer, new, seed=0)
    save_new(folder, tokenizer, model)


def chatter(vocabulary: int, *, seconds: float = 0.0) -> ScriptedSampler:
    """Says random words until it is stopped; a reply takes ``seconds``."""
    draw = random.Random(0)
    return ScriptedSampler(lambda prompt_ids: draw.choices(range(8, vocabulary), k=256), seconds=seconds)


def engine(
    folder: Path, sampler: Sampler, world: World, *, condenser: Condenser | None = None, budget: int = NO_LIMIT
) -> Engine:
    """The trajectory engine on this world."""
    tokenizer = load_tokenizer(str(folder))
    return Engine(
        sampler=SetLengths(sampler, world),
        renderer=Renderer(tokenizer, stop_ids=(tokenizer.eos_token_id,)),
        condenser=condenser or Full(),
        condenser_name="benchmark",
        toolbox=Toolbox({}, format=Native(), limits=ToolLimits(seconds=10.0)),
        limits=Limits(
            max_turns=world.turns,
            max_context_tokens=budget,
            max_output_tokens=max(map(max, world.lengths())),
            turn_seconds=NO_LIMIT,
        ),
    )


def play(
    parts: Engine,
    world: World,
    *,
    barrier: bool = False,
    on_finish: Callable[[Trajectory], object] = lambda _: None,
) -> tuple[Trajectory, ...]:
    """All trajectories of the world, each of which must have all its turns.

    Args:
        barrier: every turn waits for all others, as where turns go in lock-step.
        on_finish: called with each when it ends.
    """
    played: list[tuple[Trajectory, ...]] = []

    async def ended(trajectory: Trajectory) -> None:
        if trajectory.replies != world.turns:
            raise RuntimeError(
                f"trajectory {trajectory.id} has {trajectory.replies} of {world.turns} turns: {trajectory.stop}, "
                f"{trajectory.detail}"
            )
        on_finish(trajectory)

    async def run() -> None:  # returns nothing: asyncio.run() makes the repr of a result, however large
        meeting = asyncio.Barrier(world.trajectories) if barrier else None
        played.extend(
            await rollout_groups(
                problem_groups(world.problems(), 7),
                samples=world.samples,
                environment=lambda problem: Readings(world, problem, meeting),
                engine=parts,
                run_seed=world.seed,
                step=1,
                on_finish=ended,
            )
        )

    asyncio.run(run())
    return tuple(trajectory for group in played for trajectory in group)


def processed(trajectory: Trajectory) -> int:
    """Tokens that pass through a model which keeps nothing between turns: Σ prompt + reply."""
    return sum(len(turn.prompt_ids) + len(turn.output_ids) for turn in trajectory.turns)


def new_tokens(trajectory: Trajectory) -> int:
    """Tokens that do where keys and values of the last turn's are kept: what it shares with the next prompt is free."""
    cached: list[tuple[int, ...]] = [(), *((*turn.prompt_ids, *turn.output_ids) for turn in trajectory.turns)]
    pairs = zip(cached, (turn.prompt_ids for turn in trajectory.turns), strict=False)
    return processed(trajectory) - sum(common_prefix(before, tuple(prompt)) for before, prompt in pairs)


def waves(trajectories: Sequence[Trajectory]) -> list[list[tuple[tuple[int, ...], int]]]:
    """Turn by turn, the prompt of every trajectory and the length of its reply: what a bare engine is to be given."""
    return [
        [(trajectory.turns[turn].prompt_ids, len(trajectory.turns[turn].output_ids)) for trajectory in trajectories]
        for turn in range(len(trajectories[0].turns))
    ]
