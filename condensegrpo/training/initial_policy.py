"""The policy that GRPO starts from: a folder or Hub id, or a new model; after the warm start if there is one.

A warm start is supervised steps on a task's demonstrations, until a probe says that the policy can take a single turn.
GRPO learns from differences between samples: a policy that never gets a trajectory right has nothing to learn from.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from condensegrpo.algorithms.objective import PerToken, supervised
from condensegrpo.algorithms.packing import PackedBatch
from condensegrpo.algorithms.segments import reply_row
from condensegrpo.assembly.components import Components
from condensegrpo.assembly.demonstrations import DemonstratedTurn, Demonstrations, demonstrations
from condensegrpo.assembly.open_learner import open_learner
from condensegrpo.assembly.preflight import made_tokenizer
from condensegrpo.assembly.runtime import close_sampler, open_sampler, renderer_for
from condensegrpo.config.resumed import learned_otherwise, store_configuration
from condensegrpo.config.schema import RunConfig, WarmStartSettings
from condensegrpo.core.background_loop import PLUGIN_SECONDS, BackgroundLoop
from condensegrpo.core.errors import Interrupted, SamplerError
from condensegrpo.core.failures import plugin_code
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.protocols.task import Task
from condensegrpo.core.trajectory import SamplingParams
from condensegrpo.episodes.group import stream_seed
from condensegrpo.episodes.render import Renderer
from condensegrpo.episodes.sampling import generated
from condensegrpo.learner import checkpoint, ranks
from condensegrpo.learner.atomic_folder import published_folder
from condensegrpo.learner.engine import DeepSpeedEngine, close_deepspeed, optimizer_step
from condensegrpo.learner.model_folder import end_ids, in_main_memory, load_tokenizer, processor_files, write_policy
from condensegrpo.learner.new_model import new_model, save_new
from condensegrpo.learner.weights import gathered_weights
from condensegrpo.storage.media import MediaFolder
from condensegrpo.storage.run_folder import RunFolder

SAVE_SECONDS = 1.0  # at least between two checkpoints of the warm start
SAVE_EVERY = 20  # times as long as the last checkpoint took, if that is longer


def base_policy(config: RunConfig, task: Task, folder: RunFolder) -> str:
    """The folder or Hub id of the policy before any training. A new model is made once, in ``origin/new``."""
    new, made = config.model.new, folder.path / "origin" / "new"
    if new is None:
        return str(config.model.path)
    if ranks.rank() == 0 and not made.is_dir():
        tokenizer = made_tokenizer(task, new)
        model = new_model(tokenizer, new, seed=config.seed)
        with published_folder(made) as aside:
            save_new(aside, tokenizer, model)
    ranks.barrier()
    return str(made)


def first_policy(
    components: Components,
    folder: RunFolder,
    source: str,
    *,
    observer: Observer,
    stopping: Callable[[], bool],
) -> str:
    """The policy that GRPO starts from: ``source``, warmed up once into ``origin/warm`` if so configured."""
    config = components.config
    settings, warm = config.warm_start, folder.path / "origin" / "warm"
    if settings.steps == 0:
        return source
    if ranks.from_first(warm.is_dir()):  # looked up on rank 0 alone: other nodes' NFS caches would remember its absence
        discard_progress(warm)
        return str(warm)
    if ranks.from_first(learned_otherwise(folder, config)):
        observer.notice("the warm start begins again: the configuration was changed")
        discard_progress(warm)
    if ranks.rank() == 0:
        store_configuration(folder, config, first_step=0)
    renderer = renderer_for(components, source, folder.media)
    WarmStart(
        components=components,
        media=folder.media,
        renderer=renderer,
        demonstrations=demonstrations(components, renderer, source),
        observer=observer,
        stopping=stopping,
    ).run(source, warm)
    return str(warm)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """Supervised steps on demonstrations, in rounds of ``warm_start.steps`` steps under one schedule.

    Another round follows while a probe of single turns is short of ``probe_target``, up to ``max_rounds``. A round
    continues from its newest checkpoint and then equals an uninterrupted one; checkpoints take at most a twentieth of
    the time.
    """

    components: Components
    media: MediaFolder | None
    renderer: Renderer
    demonstrations: Demonstrations
    observer: Observer
    stopping: Callable[[], bool]

    @property
    def settings(self) -> WarmStartSettings:
        """The section ``warm_start`` of the configuration."""
        return self.components.config.warm_start

    def run(self, source: str, target: Path) -> None:
        """Train the model of folder ``source``, and publish it as folder ``target``. Every rank must call it."""
        settings = self.settings
        # looked up on rank 0 alone: other nodes' caches may know removed ones
        whole, steps = ranks.from_first((_whole_rounds(target), max(checkpoint.steps(_checkpoints(target)), default=0)))
        trained = str(_round_folder(target, whole)) if whole else source
        for number in range(max(whole, 1), settings.max_rounds + 1):
            after = _round_folder(target, number)
            if number > whole:
                self._round(number, trained, after, _checkpoints(target))
            trained = str(after)
            if settings.probe_target is None:
                break
            if number == whole and steps > number * settings.steps:
                continue  # its probe fell short before the run was stopped: the next round had begun
            sound, judged = ranks.from_first(self._probed(trained))
            self.observer.notice(
                f"warm start: {sound:.1%} of {judged} single turns are sound (target: {settings.probe_target:.0%})"
            )
            if sound >= settings.probe_target:
                break
        else:
            self.observer.notice(
                f"the warm start ends after {settings.max_rounds} rounds (warm_start.max_rounds); training starts"
            )
        if ranks.rank() == 0:
            Path(trained).rename(target)
        discard_progress(target)

    def _round(self, number: int, source: str, target: Path, checkpoints: Path) -> None:
        """Train a model folder for one round, and write it to another."""
        settings, config = self.settings, self.components.config
        learner = open_learner(
            config,
            source,
            settings.optimiser,
            lora=None if config.model.new else config.model.lora,  # beside random weights adapters learn very little
            total_steps=settings.steps,
            media=self.media,
            observer=self.observer,
        )
        first = done = (number - 1) * settings.steps  # steps of the rounds before
        try:
            newest = ranks.from_first(checkpoint.latest(checkpoints))  # other nodes' caches may know removed ones
            if newest is not None and checkpoint.step_of(newest) > first:
                checkpoint.load_checkpoint(learner, newest)
                done = checkpoint.step_of(newest)
                self.observer.notice(f"warm start: continued after step {done - first} of round {number}")
            turns = self.demonstrations.turns(config.seed, skipped=done * settings.turns_per_step)
            self.observer.phase(f"warm start, round {number}", first + settings.steps - done)
            due = time.monotonic() + SAVE_SECONDS
            for step in range(done, first + settings.steps):
                stop = ranks.any_rank(self.stopping())
                if stop or ranks.from_first(time.monotonic() >= due):
                    began = time.monotonic()
                    checkpoint.save(learner, checkpoints, step=step, state={})
                    checkpoint.prune(checkpoints, keep=1)
                    due = time.monotonic() + max(SAVE_SECONDS, SAVE_EVERY * (time.monotonic() - began))
                if stop:
                    raise Interrupted(f"stopped after step {step - first} of round {number} of the warm start")
                shown = list(islice(turns, settings.turns_per_step))
                batches = _micro_batches(shown, learner, config.learner.tokens_per_micro_batch)
                statistics = optimizer_step(learner, batches, PerToken(supervised))
                self.observer.advance(f"loss {statistics['loss']:.3f}")
            weights, architecture = in_main_memory(gathered_weights(learner)), learner.module.policy.config
            if ranks.rank() == 0:
                tokenizer, stop_ids, beside = load_tokenizer(source), end_ids(source), processor_files(source)
                write_policy(target, architecture, weights, tokenizer=tokenizer, stop_ids=stop_ids, extra_files=beside)
            ranks.barrier()  # so that every rank finds the folder
        finally:
            close_deepspeed(learner)

    def _probed(self, model: str) -> tuple[float, int]:
        """Reply to held-out demonstrations with the policy of a model folder.

        Returns:
            The share of the judged replies that the task calls sound, and how many it can judge.
        """
        seed = self.components.config.seed
        turns = list(islice(self.demonstrations.turns(seed + 1), self.settings.probe_turns))
        self.observer.phase("probing single turns", None)
        sampler = open_sampler(self.components.config, model, media=self.media, observer=self.observer)
        try:
            doing = "probing the warmed-up model with the sampler"
            with plugin_code(doing, SamplerError), BackgroundLoop("probe", close_seconds=PLUGIN_SECONDS) as loop:
                replies = loop.run(self._replies(sampler, turns))  # a notebook has a loop in this thread
        finally:
            close_sampler(sampler, self.observer)
        verdicts = [self.demonstrations.sound(turn.shown, reply) for turn, reply in zip(turns, replies, strict=True)]
        judged = [verdict for verdict in verdicts if verdict is not None]
        return sum(judged) / len(judged) if judged else 0.0, len(judged)

    async def _replies(self, sampler: Sampler, turns: Sequence[DemonstratedTurn]) -> list[str]:
        config = self.components.config

        async def reply(number: int, turn: DemonstratedTurn) -> str:
            params = SamplingParams(
                max_tokens=config.rollout.limits.max_output_tokens,
                temperature=config.rollout.temperature,
                seed=stream_seed(config.seed, 0, "probe", number, 0),
                stop_ids=self.renderer.stop_ids,
                stop_strings=self.components.toolbox.format.stop_strings,
                media=turn.media,
            )
            made = await generated(sampler, turn.prompt_ids, params)
            return self.renderer.parse(made.token_ids, turn.prompt_ids).message.text

        return await asyncio.gather(*(reply(number, turn) for number, turn in enumerate(turns)))


def discard_progress(target: Path) -> None:
    """Remove checkpoints and rounds of the warm start to ``target``: it was published, or must begin again.

    Every rank must call it.
    """
    if ranks.rank() == 0:
        for path in (*target.parent.glob(".round-*"), _checkpoints(target)):
            shutil.rmtree(path, ignore_errors=True)
    ranks.barrier()


def _checkpoints(target: Path) -> Path:
    return target.with_name(".warm-checkpoints")


def _round_folder(target: Path, number: int) -> Path:
    """The model after a round."""
    return target.with_name(f".round-{number}")


def _whole_rounds(target: Path) -> int:
    """The number of the last round that was trained whole; 0: none."""
    return next(number for number in count() if not _round_folder(target, number + 1).is_dir())


def _micro_batches(turns: Sequence[DemonstratedTurn], learner: DeepSpeedEngine, max_tokens: int) -> list[PackedBatch]:
    """This rank's micro-batches of a step; every reply token of every rank weighs the same."""
    weight = 1 / sum(len(turn.reply_ids) for turn in turns)
    of_rank = turns[ranks.rank() :: ranks.world_size()]
    rows = [
        reply_row(tuple(turn.prompt_ids), tuple(turn.reply_ids), weight=weight, media=turn.media) for turn in of_rank
    ]
    batches: list[PackedBatch] = learner.module.pack(rows, max_tokens=max_tokens)
    return batches
