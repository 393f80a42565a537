"""The demonstrations of a task, in tokens: turns that it makes, or those of its expert, played through the engine.

What the task's code raises is an error that names file and line.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import count, islice

from condensegrpo.assembly.components import Components
from condensegrpo.assembly.data_order import problem_indices
from condensegrpo.assembly.runtime import trajectory_engine
from condensegrpo.assembly.scorers import NEEDED, frozen_model, open_scorers, split_layers
from condensegrpo.core.background_loop import BackgroundLoop
from condensegrpo.core.condenser import UnitScorer
from condensegrpo.core.defaults import overrides
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.failures import plugin_code
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.task import Demonstration, Problem, Split, Task
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.episode import run_episode
from condensegrpo.episodes.group import problem_draw, stream_seed
from condensegrpo.episodes.render import OPENING, Renderer
from condensegrpo.samplers.scripted import ScriptedSampler

TOGETHER = 16  # episodes of an expert that are played at the same time
CACHED_EPISODES = 4096  # kept by tasks of at most as many problems: played again they would be the same
DONE = (StopReason.ANSWERED, StopReason.FINISHED)  # how an episode of an expert should end
NO_ROOM = (StopReason.TURN_LIMIT, StopReason.CONTEXT_OVERFLOW, StopReason.OUTPUT_LENGTH)  # stops by rollout.limits
CACHED_TEXTS = 8192  # contexts and replies whose tokens are kept: demonstrations repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstratedTurn:
    """A demonstration in tokens."""

    prompt_ids: Sequence[int]  # (P,)
    reply_ids: Sequence[int]  # (A,) end-of-turn id included
    shown: Demonstration
    media: tuple[str, ...] = ()  # the hashes of the pictures in the prompt, in order


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """The turns of a warm start: those that a task makes, rendered as the rollout renders its prompts, or its expert's.

    An expert's show what the run's condenser shows, and the texts that it asks for. Every training problem is played
    once before the first is played again. Left out are those that the expert gives up or has no room for, as long as
    these are no more than half of a batch. The turns of ``TOGETHER`` episodes are shuffled, since those of one episode
    are much alike.
    """

    task: Task
    problems: Callable[[Split], Sequence[Problem]]
    engine: Engine  # whose sampler is never called

    def turns(self, seed: int, *, skipped: int = 0) -> Iterator[DemonstratedTurn]:
        """Turns of training problems after the first ``skipped``, without end, in an order fixed by ``seed``.

        Condense turns are among those of an expert.
        """
        if overrides(self.task, Task.expert):
            return islice(self._played_turns(seed), skipped, None)
        return self._rendered(islice(made_turns(self.task, seed), skipped, None))

    def sound(self, turn: Demonstration, reply: str) -> bool | None:
        """The task's verdict on a sampled reply in the context of a turn; ``None``: that cannot be judged.

        Without a verdict a reply must have the words of the expert's.
        """
        if overrides(self.task, Task.expert) and not overrides(self.task, Task.sound):
            return reply.split() == turn.reply.split()
        return verdict_of(self.task, turn, reply)

    def _rendered(self, turns: Iterable[Demonstration]) -> Iterator[DemonstratedTurn]:
        """Turns that a task makes; they repeat, so that their tokens are kept."""
        renderer, toolbox = self.engine.renderer, self.engine.toolbox

        @lru_cache(CACHED_TEXTS)
        def prompt(context: tuple[Message, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
            messages = renderer.store_media(toolbox.introduced(context))
            media = tuple(part.sha256 for message in messages for part in message.media)
            return tuple(renderer.prompt(messages)), media

        reply = lru_cache(CACHED_TEXTS)(renderer.reply_ids)
        for turn in turns:
            ids, media = prompt(turn.context)
            yield DemonstratedTurn(prompt_ids=ids, reply_ids=reply(turn.reply, ids[-OPENING:]), shown=turn, media=media)

    def _played_turns(self, seed: int) -> Iterator[DemonstratedTurn]:
        problems, kept = self.problems("train"), dict[int, Sequence[DemonstratedTurn]]()
        size, given_up = len(problems), 0  # problems in a row
        for step in count():
            batch = problem_indices(seed=seed, step=step, count=min(TOGETHER, size), size=size)
            fresh = [*dict.fromkeys(index for index in batch if index not in kept)]
            with BackgroundLoop("expert") as loop:
                played = loop.run(self._played([problems[index] for index in fresh], seed))
            episodes = {**kept, **dict(zip(fresh, played, strict=True))}
            if size <= CACHED_EPISODES:
                kept = episodes
            turns = [turn for index in batch for turn in episodes[index]]
            given_up = 0 if turns else given_up + len(batch)
            if given_up >= size:
                raise ConfigError(
                    f"{self._playing}: it gave up {given_up} training problems in a row. Give it what it needs "
                    f"(docs/reference/tasks.md), or set warm_start.steps=0."
                )
            random.Random(f"experts {seed} {step}").shuffle(turns)
            yield from turns

    async def _played(self, problems: Sequence[Problem], seed: int) -> Sequence[Sequence[DemonstratedTurn]]:
        """The turns of some episodes, none of those that are left out."""
        played = await asyncio.gather(*(self._episode(problem, seed) for problem in problems))
        failed = [episode for episode in played if episode.stop not in (*DONE, *NO_ROOM, StopReason.ABORTED)]
        short = [episode for episode in played if episode.stop in NO_ROOM]
        if failed or len(short) > len(played) / 2:
            episode = (failed or short)[-1]
            others = f"{len(short)} of {len(played)} problems" if not failed else "a problem"
            remedy = "Correct that" if failed else "Give it the room that it needs (rollout.limits)"
            raise ConfigError(
                f"{self._playing}: {others} ended without an answer; {episode.problem_id} as {episode.stop}: "
                f"{episode.detail}. {remedy}, or set warm_start.steps=0."
            )
        return [
            [
                DemonstratedTurn(
                    prompt_ids=turn.prompt_ids,
                    reply_ids=turn.output_ids,
                    shown=Demonstration(context=tuple(turn.context), reply=turn.reply.text, problem=problem),
                    media=turn.media,
                )
                for turn in (episode.turns if episode.stop in DONE else ())
            ]
            for problem, episode in zip(problems, played, strict=True)
        ]

    async def _episode(self, problem: Problem, seed: int) -> Trajectory:
        """An episode at the context budget of a step that is drawn, see ``Engine.at_step``."""
        schedule, drawn = self.engine.condense.schedule, random.Random(f"budget {seed} {problem.id}")
        step = drawn.choice((-1, drawn.randrange(schedule[-1][0] + 1))) if schedule else 0
        return await run_episode(
            problem,
            environment=self.task.environment,
            engine=replace(self.engine.at_step(step), expert=self.task.expert(problem)),
            group_id=problem.id,
            sample=0,
            seed=partial(stream_seed, seed, 0, problem.id, 0),
            draw=problem_draw(seed, 0, problem.id),
        )

    @property
    def _playing(self) -> str:
        return f"playing as the expert of the task {type(self.task).__name__}"


def demonstrations(components: Components, renderer: Renderer, source: str) -> Demonstrations:
    """The demonstrations of the task of a run, as its policy would see them.

    Args:
        source: the model that the warm start begins with: where the condenser scores by the policy, it is this one.
    """
    check_task(components)
    task, config = components.task, components.config
    names, unused, scorers = components.condenser.scorers, ScriptedSampler([]), None
    if not overrides(task, Task.expert):
        scorers = dict[str, UnitScorer]()  # nothing is condensed
    elif any(split_layers(name)[0] in NEEDED for name in names):
        frozen = partial(frozen_model, dtype=config.model.dtype)
        scorers = open_scorers(names, sampler=frozen(source), renderer=renderer, open_model=frozen)
    writers = {config.rollout.condense.writer: unused}  # the expert writes
    engine = trajectory_engine(
        components, renderer=renderer, sampler=unused, temperature=1.0, writers=writers, scorers=scorers
    )
    engine = replace(engine, probe=None, confidence=None)
    return Demonstrations(task=task, problems=components.problems, engine=engine)


def check_task(components: Components) -> None:
    """Check that the task has what the warm start and a new model need of it; all that it lacks is reported at once."""
    config, task, faults = components.config, components.task, []
    if config.warm_start.steps and not (overrides(task, Task.expert) or overrides(task, Task.demonstrations)):
        faults.append(
            f"warming up with the task {type(task).__name__}: it has no demonstrations. Set warm_start.steps=0."
        )
    if config.model.new is not None and not overrides(task, Task.corpus):
        faults.append(_no_corpus(task))
    if faults:
        raise ConfigError("\n".join(faults))


def _no_corpus(task: Task) -> str:
    return (
        f"making a new model with the task {type(task).__name__}: a tokenizer needs its corpus(), which returns texts "
        f"with every word of the task. Give it one, a built-in task in a subclass, or set model.path instead."
    )


def made_turns(task: Task, seed: int) -> Iterator[Demonstration]:
    """The turns that a task makes, without end."""
    with _calling(task, "demonstrations"):
        for turn in task.demonstrations(seed):
            if not isinstance(turn, Demonstration):
                raise TypeError(f"yielded {turn!r:.80}, wanted a Demonstration")
            yield turn
        raise ValueError("they ended, wanted turns without end, as of a loop that begins again")


def verdict_of(task: Task, turn: Demonstration, reply: str) -> bool | None:
    """The task's verdict on a sampled reply in the context of a turn."""
    with _calling(task, "sound"):
        return task.sound(turn.context, reply)


def corpus_of(task: Task) -> tuple[str, ...]:
    """Texts that hold every word of a task."""
    if not overrides(task, Task.corpus):
        raise ConfigError(_no_corpus(task))
    with _calling(task, "corpus"):
        given = task.corpus()
        texts = tuple(given)
        if isinstance(given, str) or not all(isinstance(text, str) for text in texts):
            raise TypeError(f"returned {given!r:.80}, wanted texts, as in return [problem.question for problem in …]")
        return texts


def _calling(task: Task, method: str) -> AbstractContextManager[None]:
    return plugin_code(f"calling {method} of the task {type(task).__name__}", ConfigError, getattr(task, method))
