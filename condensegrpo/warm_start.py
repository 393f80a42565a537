"""Supervised steps on a task's own demonstrations, until a probe says that the policy can take a single turn.

GRPO learns from differences between samples: a policy that never gets a trajectory right has nothing to learn from.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from torch import Tensor

from condensegrpo import assemble
from condensegrpo.assemble import Cast
from condensegrpo.config import RunConfig
from condensegrpo.errors import ConfigError, Interrupted
from condensegrpo.learner import deepspeed, ranks
from condensegrpo.learner.policy import load_tokenizer, save_policy
from condensegrpo.learner.weights import gathered
from condensegrpo.losses import TokenLoss, nll
from condensegrpo.observer import Observer
from condensegrpo.open_learner import open_learner
from condensegrpo.packing import PackedBatch, collate, pack
from condensegrpo.protocols import Demonstrates, Demonstration, Sampler
from condensegrpo.rollout.randomness import stream_seed
from condensegrpo.rollout.render import Renderer
from condensegrpo.trajectory import SamplingParams, Segment


def warm_start(
    config: RunConfig, cast: Cast, source: str, target: Path, *, observer: Observer, stopping: Callable[[], bool]
) -> None:
    """Train the model of folder ``source`` on demonstrations and publish the result as folder ``target``.

    A round is ``warm_start.steps`` steps under one schedule. Another follows while the probe is short of
    ``warm_start.probe_target``, up to ``warm_start.max_rounds``.

    Raises:
        ConfigError: the task shows no demonstrations.
        Interrupted: ``stopping`` said so; nothing was published.
    """
    task, settings = cast.task, config.warm_start
    if not isinstance(task, Demonstrates):
        raise ConfigError(
            f"warming up on task {config.task.name!r}: it has no demonstrations. "
            f"Set warm_start.steps=0 or give the task some."
        )
    tokenizer = load_tokenizer(source)
    renderer = assemble.renderer(config, cast, tokenizer)
    lessons = _lessons(
        task.demonstrations(config.seed), renderer, settings.turns_per_step, config.learner.tokens_per_micro_batch
    )
    for number in range(1, settings.max_rounds + 1):
        learner = open_learner(config, source, settings.optimiser, total_steps=settings.steps)
        observer.phase(f"warm start, round {number}", settings.steps)
        try:
            _teach(learner, islice(lessons, settings.steps), observer, stopping)
            source = str(target.with_name(f".round-{number}"))
            save_policy(
                Path(source),
                model_config=learner.module.policy.config,
                named_tensors=gathered(learner),
                tokenizer=tokenizer,
            )
        finally:
            deepspeed.close(learner)
        if settings.probe_target is None or _probe(config, task, renderer, source, observer) >= settings.probe_target:
            break
    if ranks.rank() == 0:
        Path(source).rename(target)
    ranks.barrier()


def _teach(
    learner: deepspeed.DeepSpeedEngine,
    lessons: Iterator[list[PackedBatch]],
    observer: Observer,
    stopping: Callable[[], bool],
) -> None:
    for batches in lessons:
        if ranks.any_rank(stopping()):
            raise Interrupted("stopped during the warm start, which will be repeated")
        stats = deepspeed.optimise(learner, batches, _supervised)
        observer.advance(f"loss {stats['loss']:.3f}")


def _lessons(
    turns: Iterator[Demonstration], renderer: Renderer, turns_per_step: int, max_tokens: int
) -> Iterator[list[PackedBatch]]:
    """The micro-batches of one step after another, without end."""
    while True:
        yield _batches(list(islice(turns, turns_per_step)), renderer, max_tokens=max_tokens)


def _batches(turns: Sequence[Demonstration], renderer: Renderer, *, max_tokens: int) -> list[PackedBatch]:
    """This rank's share of some demonstrated turns, packed; every reply token of every rank weighs the same."""
    replies = [renderer.reply_ids(turn.reply) for turn in turns]
    weight = 1 / sum(len(reply) for reply in replies)
    mine = slice(ranks.rank(), None, ranks.world_size())
    rows = [
        _row(renderer.prompt(turn.context), reply, weight)
        for turn, reply in zip(turns[mine], replies[mine], strict=True)
    ]
    packed = pack([len(row.token_ids) for row in rows], max_tokens)
    return [collate([rows[index] for index in batch]) for batch in packed]


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


def _supervised(logp_T: Tensor, batch: PackedBatch) -> TokenLoss:
    return nll(logp_T)


def _probe(config: RunConfig, task: Demonstrates, renderer: Renderer, model: str, observer: Observer) -> float:
    """The share of sampled single replies that the task calls sound, among those that it can judge."""
    turns = list(islice(task.demonstrations(config.seed + 1), config.warm_start.probe_turns))
    observer.phase("probing single turns", None)
    sampler = assemble.sampler(config, model)
    try:
        replies = asyncio.run(_replies(config, sampler, renderer, turns))
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
    config: RunConfig, sampler: Sampler, renderer: Renderer, turns: Sequence[Demonstration]
) -> list[str]:
    async def reply(number: int, turn: Demonstration) -> str:
        params = SamplingParams(
            max_tokens=config.rollout.max_output_tokens,
            temperature=config.rollout.temperature,
            seed=stream_seed(config.seed, 0, "probe", number, 0),
            stop_ids=renderer.stop_ids,
        )
        return renderer.text((await sampler.sample(renderer.prompt(turn.context), params)).token_ids)

    return await asyncio.gather(*(reply(number, turn) for number, turn in enumerate(turns)))
