"""The training loop: each step takes trajectories, gives credit, updates the policy and sends the new weights.

problems ─▶ groups of trajectories ─▶ scores ─▶ advantages ─▶ segments ─▶ one optimiser step ─▶ sampler

Only this file sees all components of a run; every step takes the values that it needs.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice

from condensegrpo.algorithms.advantages import EstimatorPlugin
from condensegrpo.algorithms.credit import rows_of
from condensegrpo.assembly.components import Components
from condensegrpo.assembly.open_learner import choices, open_learner
from condensegrpo.assembly.policy import frozen_writers, writer_folder
from condensegrpo.assembly.preflight import check_architecture, check_model
from condensegrpo.assembly.runtime import close_sampler, open_sampler, open_writers, use_threads
from condensegrpo.assembly.workers import GroupPlayer, RolloutPlayers
from condensegrpo.config.load import plugin_files
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.background_loop import Watch
from condensegrpo.core.errors import SamplerError, TooManyFailed
from condensegrpo.core.failures import plugin_code
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.episodes.failures import FailureWatch, failures_of, mostly_cut
from condensegrpo.evaluation.evaluate import evaluate_variant
from condensegrpo.evaluation.figures import metric_prefix
from condensegrpo.learner import ranks
from condensegrpo.learner.devices import gpu_bfloat16, precision_warning
from condensegrpo.learner.engine import (
    DeepSpeedEngine,
    Reference,
    against_base,
    against_copy,
    close_deepspeed,
    open_reference,
)
from condensegrpo.learner.model_folder import local_source, save_tokenizer
from condensegrpo.learner.training_state import at_schedule, on_device
from condensegrpo.planning.plan import config_on_devices
from condensegrpo.samplers.scripted import ScriptedSampler
from condensegrpo.storage.environment import edited_inputs, write_environment
from condensegrpo.storage.run_folder import RunFolder, read_metrics
from condensegrpo.training.agreement import check_agreement
from condensegrpo.training.checkpoints import CheckpointSaver, resume
from condensegrpo.training.initial_policy import base_policy, first_policy
from condensegrpo.training.learn_step import (
    StepCredit,
    give_credit,
    no_signal,
    record_credit,
    sampled_weights,
    step_metrics,
    update,
)
from condensegrpo.training.parity import check_first_step
from condensegrpo.training.rollout import BatchRollout, RolloutPrefetcher, StepBatch, sampler_gets_weights
from condensegrpo.training.tracking import RunTracking

PATIENCE = 3  # steps in a row from which nothing was learned before the log says why
HINT_EVERY = 20  # steps until it says so again


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What is opened once and used during a whole training run."""

    components: Components
    folder: RunFolder
    players: RolloutPlayers  # with the folder or Hub id that GRPO starts from
    player: GroupPlayer  # of the batches
    learner: DeepSpeedEngine
    reference: Reference | None  # only where a KL term is measured against it
    prefetcher: RolloutPrefetcher
    saver: CheckpointSaver
    observer: Observer
    tracking: RunTracking | None  # on the first rank

    @property
    def config(self) -> RunConfig:
        """The configuration of the components."""
        return self.components.config

    @property
    def sampler(self) -> Sampler:
        """The sampler of this rank."""
        return self.players.sampler


def run_training(
    components: Components, folder: RunFolder, *, observer: Observer, stopping: Callable[[], bool]
) -> bool:
    """Train in a run folder, from its newest checkpoint if it has one.

    Args:
        components: what ``build`` built from the configuration.
        stopping: called after every step and evaluation; True saves a checkpoint and returns.

    Returns:
        Whether all steps were taken.
    """
    config = components.config
    use_threads(config)
    ranks.join(config.learner.timeout_minutes)
    if ranks.rank() == 0:
        folder.remove_leftovers()
    check_agreement(components, folder.path)
    edited: tuple[str, ...] = ()
    if ranks.rank() == 0:
        configs = [each.config for each in (components, *components.evaluations.values())]
        writers = {name: found for name in frozen_writers(configs) if (found := writer_folder(name)) is not None}
        if writers:
            observer.phase("comparing the files of rollout.condense.writer", None)
        edited = edited_inputs(folder.path, writers.get)
        observer.log_lines(write_environment(folder.path, plugins=plugin_files(config), writers=writers))
    changed = (f"{name} was edited since this run began to use it" for name in edited)
    for warning in (*changed, *_warnings(config, components.estimator.plugin)):
        observer.notice(warning)
    downloaded = config.model.new is None and local_source(str(config.model.path)) is None
    source = base_policy(config, components.task, folder)
    if downloaded:  # and so not rehearsed yet
        for note in check_model(components, source, trains=True):
            observer.notice(note)
    elif config.model.new is not None:
        check_architecture(components, source)
    source = first_policy(components, folder, source, observer=observer, stopping=stopping)
    with _opened(components, folder, source, observer) as (run, done):
        last = max(done, config.train.steps)  # a resumed run may be beyond its steps
        if last == 0:
            _save(run, 0)
        if _evaluation_is_due(run, done):
            _evaluate(run, done)
        elif 0 < last == done:
            observer.notice(
                f"no step is left to train: train.steps is {config.train.steps}. Set a larger train.steps to continue"
            )
        return _loop(run, done, stopping)


def _let_sleep(sampler: Sampler, name: str, observer: Observer) -> None:
    """Let a new sampler sleep if it can: opening the learner takes memory. It gets the learner's weights afterwards."""
    with plugin_code(f"opening the sampler {name}", SamplerError):
        if chosen := sampler.describe():
            observer.notice(str(chosen))
        sampler.sleep(keep_weights=False)


@contextmanager
def _opened(components: Components, folder: RunFolder, source: str, observer: Observer) -> Iterator[tuple[_Run, int]]:
    """Load the policy into sampler and learner, resume, and start the prefetcher; every rank must call it.

    Yields the run and the number of steps already taken.
    """
    config = components.config
    if ranks.rank() == 0:
        save_tokenizer(source, folder.path)
    # One after another: both set torch's default type, and vLLM measures the free memory of the device.
    # The stack closes what is open where the next cannot be opened.
    with ExitStack() as opened:
        lora = config.model.sampled_lora
        fitted = config_on_devices(config, ranks=ranks.world_size(), memory=ranks.least_device_memory())
        observer.phase(f"opening the sampler {config.sampler.name}", None)
        sampler = open_sampler(
            fitted, source, lora=lora, objects=components.objects, media=folder.media, observer=observer
        )
        opened.callback(close_sampler, sampler, observer)
        _let_sleep(sampler, config.sampler.name, observer)
        learner = open_learner(
            fitted,
            source,
            config.learner.optimiser,
            lora=config.model.lora,
            total_steps=config.train.steps * config.algorithm.updates_per_batch,
            media=folder.media,
            observer=observer,
        )
        opened.callback(close_deepspeed, learner)
        for note in choices(fitted, learner):
            observer.notice(note)
        configs = [each.config for each in (components, *components.evaluations.values())]
        players = RolloutPlayers(sampler, source, folder.media, writers=open_writers(configs, source, folder.media))
        opened.callback(players.close)
        player = players.player(components, temperature=config.rollout.temperature)
        tracking = RunTracking(config, folder, observer) if ranks.rank() == 0 else None
        if tracking is not None:
            opened.callback(tracking.close)
        done, batches = resume(config, folder, sampler, learner, observer)
        if tracking is not None:
            tracking.start(done)
        saver = opened.enter_context(CheckpointSaver(config, folder.checkpoints, source, learner))
        prefetcher = opened.enter_context(
            RolloutPrefetcher(
                BatchRollout(
                    config=config,
                    problems=components.problems("train"),
                    estimator=components.estimator,
                    player=player,
                    folder=folder,
                    source=source,
                ),
                observer,
                batches=batches,
                watch=Watch(config.rollout.limits.turn_seconds, observer.notice),
            )
        )
        yield (
            _Run(
                components=components,
                folder=folder,
                players=players,
                player=player,
                learner=learner,
                reference=_reference(config, source, learner),
                prefetcher=prefetcher,
                saver=saver,
                observer=observer,
                tracking=tracking,
            ),
            done,
        )


def _reference(config: RunConfig, source: str, learner: DeepSpeedEngine) -> Reference | None:
    model, device = config.model, learner.device
    if not config.algorithm.kl.coefficient:
        return None
    if model.lora is not None:
        return partial(against_base, learner)
    home = "cpu" if config.learner.offload.reference else device
    copy = open_reference(
        source,
        dtype=model.dtype,
        attention=model.attention,
        device=home,
        group=learner.module.group,
        pictures=learner.module.pictures,
    )
    return partial(against_copy, copy, device)


def _evaluation_is_due(run: _Run, done: int) -> bool:
    """Whether the policy after ``done`` steps is still to be evaluated: at the start, or where a run was stopped."""
    schedule = run.config.train
    planned = schedule.eval_every and done % schedule.eval_every == 0 if done else schedule.eval_on_start
    if done < schedule.steps and not planned:
        return False
    recorded = {key for line in read_metrics(run.folder.metrics) if line["step"] == done for key in line}
    expected = {f"{metric_prefix(name)}/success" for name in _evaluations_after(run, done)}
    return not ranks.from_first(expected <= recorded)


def _evaluations_after(run: _Run, step: int) -> Mapping[str, Components]:
    """What is evaluated after a step: the held-out problems; before and after training the variants too."""
    evaluations = run.components.evaluations
    return dict(islice(evaluations.items(), 1)) if 0 < step < run.config.train.steps else evaluations


def _loop(run: _Run, done: int, stopping: Callable[[], bool]) -> bool:
    schedule = run.config.train
    failing, idle = FailureWatch(schedule.max_failed), 0  # steps in a row from which nothing was learned
    if done < schedule.steps and ranks.any_rank(stopping()):  # requested while the policy was loaded or evaluated
        return False
    for step in range(done + 1, schedule.steps + 1):
        with _saved_if_most_fail(run, step - 1):
            metrics = _step(run, step, failing, first=step == done + 1)
        if run.tracking is not None:
            run.tracking.log(step, metrics)
        run.observer.step(step, metrics)
        why = no_signal(metrics)
        idle = idle + 1 if why else 0
        if idle % HINT_EVERY == PATIENCE:
            run.observer.notice(f"nothing was learned in steps {step - idle + 1} to {step}: {why}")
        last = step == schedule.steps
        stop = ranks.any_rank(stopping())
        save = last or stop or bool(schedule.save_every and step % schedule.save_every == 0)
        if save:  # before the evaluations, which may take longer than the steps: a killed run makes those again
            _save(run, step)
            stop = stop or ranks.any_rank(stopping())  # it may have waited for trajectories
        if stop:
            return False
        if last or (schedule.eval_every and step % schedule.eval_every == 0):
            _send_weights(run, step)
            with _saved_if_most_fail(run, step):
                _evaluate(run, step)
            if not last and ranks.any_rank(stopping()):
                if not save:
                    _save(run, step)
                return False
    return True


def _step(run: _Run, step: int, failing: FailureWatch, *, first: bool) -> dict[str, float]:
    """From one batch of problems to one optimiser step; returns its metrics. ``first``: of this start of the run."""
    began = time.monotonic()
    batch = run.prefetcher.take(step)
    failing.check(ranks.gather(failures_of(batch.trajectories)), run.observer)
    if first:
        ends = ranks.gather([(each.trajectory.stop, each.trajectory.detail) for each in batch.trajectories])
        if cut := mostly_cut([*chain.from_iterable(ends)]):
            run.observer.notice(cut)
    update_follows = sampler_gets_weights(step, run.config.rollout.staleness)
    if run.prefetcher.idle:
        with plugin_code("letting the sampler sleep", SamplerError):
            run.sampler.sleep(keep_weights=not update_follows)
    sampled = time.monotonic()
    credit, statistics = _learn(run, step, batch, first=first)
    learned = time.monotonic()
    waited = _send_weights(run, step) if update_follows else 0.0
    ended = time.monotonic()
    return {
        **_metrics(run, step, batch, credit),
        **statistics,
        "seconds": ended - began,
        "seconds/rollout": sampled - began + waited,
        "seconds/learn": learned - sampled,
        "seconds/sync": ended - learned - waited,
    }


def _learn(run: _Run, step: int, batch: StepBatch, *, first: bool) -> tuple[StepCredit, dict[str, float]]:
    """Give credit to a batch and take its optimiser steps; returns the credit and the statistics of the last one."""
    algorithm, rollout = run.config.algorithm, run.config.rollout
    credit = give_credit(
        batch.kept,
        run.components.estimator,
        replace(algorithm.aggregation, max_tokens=run.config.longest_output),
        stops=algorithm.stops,
        whitened=algorithm.advantage.whiten,
        sources=algorithm.advantage.sources,
        kl_aggregation=algorithm.kl.aggregation,
    )
    record_credit(run.folder.credit(step), batch, credit, stops=algorithm.stops)
    rows = rows_of(
        batch.kept,
        credit.advantage_NK,
        credit.weight_NK,
        kl_weight_NK=credit.kl_weight_NK,
        kl=run.reference is not None,
    )
    at_schedule(run.learner, (step - 1) * algorithm.updates_per_batch)  # steps that had nothing to learn count
    run.observer.phase(f"step {step}: learning", None)
    with on_device(run.learner) if run.config.learner.offload.rollouts else nullcontext():
        made_up = isinstance(run.sampler, ScriptedSampler)  # its log-probabilities are of no model
        if first and not made_up and (parity := check_first_step(run.config, run.learner, batch.kept, step=step)):
            run.observer.notice(f"sampler {run.config.sampler.name}: {parity}")
        statistics = update(
            run.learner,
            rows,
            run.components.objective,
            reference=run.reference,
            updates=algorithm.updates_per_batch,
            measure_old=bool(algorithm.importance.cap) and algorithm.updates_per_batch > 1,
            temperature=rollout.temperature,
            max_tokens=run.config.learner.tokens_per_micro_batch,
        )
    return credit, statistics


def _metrics(run: _Run, step: int, batch: StepBatch, credit: StepCredit) -> dict[str, float]:
    """The metrics of a batch. The condenser counts for other batches too: read it while nothing is being sampled."""
    metrics = step_metrics(
        step,
        batch,
        credit,
        counts=run.player.counts,
        stops=run.config.algorithm.stops,
        outcome_N=run.components.estimator.outcome(credit.scores),
        observer=run.observer,
    )
    for name, value in metrics.items():
        if name.startswith("condenser/") and name.endswith("refused") and value:
            run.observer.notice(f"{name}: {value:g} in this step; condensegrpo inspect says why")
    return metrics


def _send_weights(run: _Run, step: int) -> float:
    """Give the sampler the weights after ``step``, unless it has them; returns the seconds waited for its requests."""
    if run.sampler.version == step:
        return 0.0
    return run.prefetcher.update_sampler(run.sampler, sampled_weights(run.sampler, run.learner), step)


def _evaluate(run: _Run, step: int) -> None:
    """Make the evaluations after a step, and record them."""
    results = [
        evaluate_variant(
            name,
            components,
            players=run.players,
            step=step,
            observer=run.observer,
            file=run.folder.evaluation(step, name),
        )
        for name, components in _evaluations_after(run, step).items()
    ]
    if run.tracking is not None:
        run.tracking.evaluated(step, results)
    run.observer.evaluated(step, results)


@contextmanager
def _saved_if_most_fail(run: _Run, done: int) -> Iterator[None]:
    """Save a checkpoint of ``done`` steps before an error that ends the run because of its plug-ins: it can resume.

    It holds no prefetched batches: they were sampled with the same plug-ins.
    """
    try:
        yield
    except TooManyFailed:
        if done:
            run.saver.save(done, {})
        raise


def _save(run: _Run, step: int) -> None:
    batches = run.prefetcher.finish()
    run.observer.phase("saving a checkpoint", None)
    run.saver.save(step, batches)


def _warnings(config: RunConfig, estimator: EstimatorPlugin) -> Iterator[str]:
    """Warnings of a slow dtype, and of settings that the estimator does not use."""
    if slow := precision_warning(config.model.dtype, gpu_bfloat16()):
        yield slow
    if estimator.learns_from == "score" and "penalise" in config.algorithm.stops.handling.values():
        yield (
            f"the estimator {config.estimator} gives a penalised stop the score 0 and no less: "
            "algorithm.stops.penalty, which is subtracted from the total reward, changes nothing"
        )
