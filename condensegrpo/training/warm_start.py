"""Supervised steps on a task's own demonstrations, until a probe says that the policy can take a single turn.

GRPO learns from differences between samples: a policy that never gets a trajectory right has nothing to learn from.
"""

import asyncio
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from condensegrpo.algorithms.objective import Tokenwise, supervised
from condensegrpo.algorithms.packing import PackedBatch
from condensegrpo.algorithms.segments import reply_row
from condensegrpo.config.schema import WarmStartSettings
from condensegrpo.core.errors import Interrupted
from condensegrpo.core.messages import Message
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols import Demonstrates, Sampler
from condensegrpo.core.trajectory import SamplingParams
from condensegrpo.learner import ranks
from condensegrpo.learner.engine import DeepSpeedEngine, close_engine, optimizer_step
from condensegrpo.learner.micro_batches import pack_rows
from condensegrpo.learner.policy import end_ids, load_tokenizer, save_policy
from condensegrpo.learner.weights import gathered
from condensegrpo.rollout.randomness import stream_seed
from condensegrpo.rollout.render import Renderer
from condensegrpo.rollout.toolcalls import Toolbox

Pair = tuple[tuple[int, ...], tuple[int, ...]]  # the ids of a prompt and of the reply to it
CACHED = 8192  # contexts and replies that are kept in tokens: demonstrations repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """A task's demonstrations in tokens, rendered as the rollout renders its prompts."""

    task: Demonstrates
    renderer: Renderer
    toolbox: Toolbox
    seed: int
    max_tokens: int  # of a micro-batch

    def pairs(self) -> Iterator[Pair]:
        """Prompts and replies, without end."""
        prompt, reply = lru_cache(CACHED)(self.prompt), lru_cache(CACHED)(self.renderer.reply_ids)
        return ((prompt(turn.context), reply(turn.reply)) for turn in self.task.demonstrations(self.seed))

    def prompt(self, context: tuple[Message, ...]) -> tuple[int, ...]:
        """The ids of a context."""
        return self.renderer.prompt(self.toolbox.introduced(context))


class ProbeResult(NamedTuple):
    """How many sampled replies were sound."""

    sound: float  # share of the judged replies
    judged: int  # replies that the task can judge


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Samples single replies to held-out demonstrations and counts those that the task calls sound."""

    lessons: Lessons
    open_sampler: Callable[[str], Sampler]  # for a model folder
    turns: int
    max_output_tokens: int
    temperature: float

    def run(self, model: str, observer: Observer) -> ProbeResult:
        """Probe the policy of a model folder."""
        lessons = self.lessons
        turns = list(islice(lessons.task.demonstrations(lessons.seed + 1), self.turns))
        prompts = list(map(lru_cache(CACHED)(lessons.prompt), (turn.context for turn in turns)))
        observer.phase("probing single turns", None)
        sampler = self.open_sampler(model)
        try:
            replies = asyncio.run(self._replies(sampler, prompts))
        finally:
            sampler.close()
        verdicts = [lessons.task.sound(turn.context, reply) for turn, reply in zip(turns, replies, strict=True)]
        judged = [verdict for verdict in verdicts if verdict is not None]
        return ProbeResult(sound=sum(judged) / len(judged) if judged else 0.0, judged=len(judged))

    async def _replies(self, sampler: Sampler, prompts: Sequence[tuple[int, ...]]) -> list[str]:
        renderer = self.lessons.renderer

        async def reply(number: int, prompt: tuple[int, ...]) -> str:
            params = SamplingParams(
                max_tokens=self.max_output_tokens,
                temperature=self.temperature,
                seed=stream_seed(self.lessons.seed, 0, "probe", number, 0),
                stop_ids=renderer.stop_ids,
                stop_strings=self.lessons.toolbox.format.stop_strings,
            )
            return renderer.text((await sampler.sample(prompt, params)).token_ids)

        return await asyncio.gather(*(reply(number, prompt) for number, prompt in enumerate(prompts)))


def warm_start(
    source: str,
    target: Path,
    *,
    lessons: Lessons,
    open_learner: Callable[[str], DeepSpeedEngine],
    settings: WarmStartSettings,
    probe: Probe,
    observer: Observer,
    stopping: Callable[[], bool],
) -> None:
    """Train the model of folder ``source`` on demonstrations and publish the result as folder ``target``.

    A round is ``settings.steps`` steps under one schedule. Another round follows while the probe is short of
    ``settings.probe_target``, up to ``settings.max_rounds``. Every rank must call it.

    Args:
        open_learner: a fresh learner for a model folder.

    Raises:
        Interrupted: ``stopping`` said so; nothing was published.
    """
    tokenizer, stop_ids, pairs = load_tokenizer(source), end_ids(source), lessons.pairs()
    for number in range(1, settings.max_rounds + 1):
        learner = open_learner(source)
        observer.phase(f"warm start, round {number}", settings.steps)
        try:
            for _ in range(settings.steps):
                if ranks.any_rank(stopping()):
                    raise Interrupted("stopped during the warm start, which will be repeated")
                batches = _micro_batches(list(islice(pairs, settings.turns_per_step)), learner, lessons.max_tokens)
                statistics = optimizer_step(learner, batches, Tokenwise(supervised))
                observer.advance(f"loss {statistics['loss']:.3f}")
            source = str(target.with_name(f".round-{number}"))
            save_policy(
                Path(source),
                model_config=learner.module.policy.config,
                named_tensors=gathered(learner),
                tokenizer=tokenizer,
                stop_ids=stop_ids,
            )
        finally:
            close_engine(learner)
        if settings.probe_target is None:
            break
        result = ranks.from_first(probe.run(source, observer))
        observer.say(
            f"warm start: {result.sound:.1%} of {result.judged} single turns are sound "
            f"(wanted: {settings.probe_target:.0%})"
        )
        if result.sound >= settings.probe_target:
            break
    else:
        observer.say(f"the warm start ends after {settings.max_rounds} rounds (warm_start.max_rounds); training starts")
    _publish(Path(source), target)


def _publish(source: Path, target: Path) -> None:
    """Rename the folder of the last round and remove those of earlier rounds."""
    if ranks.rank() == 0:
        source.rename(target)
        for earlier in target.parent.glob(".round-*"):
            shutil.rmtree(earlier)
    ranks.barrier()


def _micro_batches(pairs: Sequence[Pair], learner: DeepSpeedEngine, max_tokens: int) -> list[PackedBatch]:
    """This rank's micro-batches of a step; every reply token of every rank weighs the same."""
    weight = 1 / sum(len(reply) for _, reply in pairs)
    rows = [reply_row(prompt, reply, weight=weight) for prompt, reply in pairs[ranks.rank() :: ranks.world_size()]]
    return pack_rows(rows, max_tokens=max_tokens, share=learner.module.computes_trees)
