"""Supervised steps on a task's own demonstrations, until a probe says that the policy can take a single turn.

GRPO learns from differences between samples: a policy that never gets a trajectory right has nothing to learn from.
"""

import asyncio
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path

from condensegrpo.algorithms.objective import Tokenwise, supervised
from condensegrpo.algorithms.packing import PackedBatch
from condensegrpo.assembly import assemble
from condensegrpo.assembly.assemble import Components
from condensegrpo.assembly.open_learner import open_learner
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError, Interrupted
from condensegrpo.core.messages import Message
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols import Demonstrates, Sampler
from condensegrpo.core.trajectory import SamplingParams, Segment
from condensegrpo.learner import ranks
from condensegrpo.learner.engine import DeepSpeedEngine, close_engine, optimizer_step
from condensegrpo.learner.micro_batches import pack_rows
from condensegrpo.learner.policy import end_ids, load_tokenizer, save_policy
from condensegrpo.learner.weights import gathered
from condensegrpo.rollout.randomness import stream_seed
from condensegrpo.rollout.render import Renderer
from condensegrpo.rollout.toolcalls import TOOL_FORMATS, Toolbox

Pair = tuple[tuple[int, ...], tuple[int, ...]]  # the ids of a prompt and of the reply to it


def warm_start(
    config: RunConfig,
    components: Components,
    source: str,
    target: Path,
    *,
    observer: Observer,
    stopping: Callable[[], bool],
) -> None:
    """Train the model of folder ``source`` on demonstrations and publish the result as folder ``target``.

    A round is ``warm_start.steps`` steps under one schedule. Another follows while the probe is short of
    ``warm_start.probe_target``, up to ``warm_start.max_rounds``.

    Raises:
        ConfigError: the task shows no demonstrations.
        Interrupted: ``stopping`` said so; nothing was published.
    """
    task, settings = _demonstrating(config, components), config.warm_start
    tokenizer, stop_ids = load_tokenizer(source), end_ids(source)
    renderer = assemble.renderer(config, components, source)
    prompt, reply = _prompts(renderer, components.toolbox), lru_cache(maxsize=8192)(renderer.reply_ids)
    pairs = ((prompt(turn.context), reply(turn.reply)) for turn in task.demonstrations(config.seed))
    lora = None if config.model.new else config.model.lora  # adapters of random weights would learn next to nothing
    for number in range(1, settings.max_rounds + 1):
        learner = open_learner(config, source, settings.optimiser, lora=lora, total_steps=settings.steps)
        lessons = _lessons(pairs, learner, settings.turns_per_step, config.learner.tokens_per_micro_batch)
        observer.phase(f"warm start, round {number}", settings.steps)
        try:
            _teach(learner, islice(lessons, settings.steps), observer, stopping)
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
        sound = ranks.from_first(_probe(config, components, renderer, source, observer))
        if sound >= settings.probe_target:
            break
        if number == settings.max_rounds:
            observer.say(f"the warm start gives up after {number} rounds (warm_start.max_rounds) and training goes on")
    if ranks.rank() == 0:
        Path(source).rename(target)
        for earlier in target.parent.glob(".round-*"):
            shutil.rmtree(earlier)
    ranks.barrier()


def _demonstrating(config: RunConfig, components: Components) -> Demonstrates:
    if isinstance(components.task, Demonstrates):
        return components.task
    raise ConfigError(
        f"warming up on task {config.task.name!r}: it has no demonstrations. Set warm_start.steps=0 or give the "
        f"task some."
    )


def _teach(
    learner: DeepSpeedEngine,
    lessons: Iterator[list[PackedBatch]],
    observer: Observer,
    stopping: Callable[[], bool],
) -> None:
    for batches in lessons:
        if ranks.any_rank(stopping()):
            raise Interrupted("stopped during the warm start, which will be repeated")
        stats = optimizer_step(learner, batches, Tokenwise(supervised))
        observer.advance(f"loss {stats['loss']:.3f}")


def _prompts(renderer: Renderer, toolbox: Toolbox) -> Callable[[tuple[Message, ...]], tuple[int, ...]]:
    """Renders contexts as the rollout does; one that comes again is not rendered again."""

    @lru_cache(maxsize=8192)
    def prompt(context: tuple[Message, ...]) -> tuple[int, ...]:
        return renderer.prompt(toolbox.introduced(context))

    return prompt


def _lessons(
    pairs: Iterator[Pair], learner: DeepSpeedEngine, turns_per_step: int, max_tokens: int
) -> Iterator[list[PackedBatch]]:
    """The micro-batches of one step after another, without end."""
    while True:
        rows = _rows(list(islice(pairs, turns_per_step)))
        yield pack_rows(rows, max_tokens=max_tokens, share=learner.module.computes_trees)


def _rows(pairs: Sequence[Pair]) -> list[Segment]:
    """This rank's share of some (prompt, reply) pairs; every reply token of every rank weighs the same."""
    weight = 1 / sum(len(reply) for _, reply in pairs)
    return [_row(prompt, reply, weight) for prompt, reply in pairs[ranks.rank() :: ranks.world_size()]]


def _row(prompt: tuple[int, ...], reply: tuple[int, ...], weight: float) -> Segment:
    context, length = (0.0,) * len(prompt), len(reply)
    return Segment(
        token_ids=prompt + reply,
        trained=(False,) * len(prompt) + (True,) * length,
        logprobs=context + (0.0,) * length,
        advantages=context + (0.0,) * length,
        weights=context + (weight,) * length,
        trajectory="demonstration",
        first_turn=0,
    )


def _probe(config: RunConfig, components: Components, renderer: Renderer, model: str, observer: Observer) -> float:
    """The share of sampled single replies that the task calls sound, among those that it can judge."""
    task = _demonstrating(config, components)
    turns = list(islice(task.demonstrations(config.seed + 1), config.warm_start.probe_turns))
    prompts = list(map(_prompts(renderer, components.toolbox), (turn.context for turn in turns)))
    observer.phase("probing single turns", None)
    sampler = assemble.sampler(config, model)
    try:
        replies = asyncio.run(_replies(config, sampler, renderer, prompts))
    finally:
        sampler.close()
    judged = [task.sound(turn.context, reply) for turn, reply in zip(turns, replies, strict=True)]
    known = [verdict for verdict in judged if verdict is not None]
    sound = sum(known) / len(known) if known else 0.0
    observer.say(
        f"warm start: {sound:.1%} of {len(known)} single turns are sound (wanted: {config.warm_start.probe_target:.0%})"
    )
    return sound


async def _replies(
    config: RunConfig, sampler: Sampler, renderer: Renderer, prompts: Sequence[tuple[int, ...]]
) -> list[str]:
    async def reply(number: int, prompt: tuple[int, ...]) -> str:
        params = SamplingParams(
            max_tokens=config.rollout.max_output_tokens,
            temperature=config.rollout.temperature,
            seed=stream_seed(config.seed, 0, "probe", number, 0),
            stop_ids=renderer.stop_ids,
            stop_strings=TOOL_FORMATS[config.rollout.tool_format].stop_strings,
        )
        return renderer.text((await sampler.sample(prompt, params)).token_ids)

    return await asyncio.gather(*(reply(number, prompt) for number, prompt in enumerate(prompts)))
