"""The training loop. One step reads as its sentence: roll out, give credit, update, send the new weights.

problems ─▶ groups of trajectories ─▶ scores ─▶ advantages ─▶ segments ─▶ one optimiser step ─▶ sampler
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from torch import Tensor

from condensegrpo import assemble
from condensegrpo.assemble import Cast
from condensegrpo.collect import collect, tell_failures
from condensegrpo.config import RunConfig, dump_config, evaluations
from condensegrpo.credit import Scores, rows_of, scores_of, turn_tokens
from condensegrpo.data_order import indices
from condensegrpo.errors import CondenseError, ConfigError, RunError
from condensegrpo.evaluate import evaluate
from condensegrpo.evaluation import flat
from condensegrpo.learner import checkpoint, deepspeed, ranks
from condensegrpo.learner.policy import end_ids, load_tokenizer, save_policy
from condensegrpo.learner.weights import gathered
from condensegrpo.losses import TokenLoss, Totals, token_weights, totals
from condensegrpo.metrics import group_signal, summarise
from condensegrpo.observer import Observer
from condensegrpo.open_learner import open_learner
from condensegrpo.origin import base_policy, first_policy
from condensegrpo.packing import PackedBatch, collate, pack
from condensegrpo.protocols import Problem, Sampler, Tracker
from condensegrpo.rollout.episode import Engine
from condensegrpo.rollout.group import named
from condensegrpo.storage import Credit, RunFolder, read_metrics, write_atomically, write_credit, write_trajectory
from condensegrpo.tracking import JsonlTracker
from condensegrpo.trajectory import ScoredTrajectory, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """What lives as long as a run does."""

    config: RunConfig
    folder: RunFolder
    cast: Cast
    problems: Sequence[Problem]
    source: str  # the folder or Hub id that GRPO starts from
    sampler: Sampler
    engine: Engine  # of trajectories
    learner: deepspeed.DeepSpeedEngine
    observer: Observer
    trackers: tuple[Tracker, ...]  # none on any rank but the first


def train(
    config: RunConfig, cast: Cast, folder: RunFolder, *, observer: Observer, stopping: Callable[[], bool]
) -> bool:
    """Run, or go on with, the training of a run folder.

    Args:
        cast: what ``assemble.check`` made of the configuration.
        stopping: asked after every step; True saves a checkpoint and returns.

    Returns:
        Whether all steps were taken.

    Raises:
        ConfigError: before any model is trained, if the configuration cannot work with this model.
        Interrupted: stopped before there was anything to save.
    """
    assemble.use_threads(config)
    deepspeed.join()
    _check_ranks(config)
    if config.algorithm.estimator == "efficient" and config.reward.name != "correct":
        observer.say(
            f"the estimator efficient learns from correctness and context tokens: the total of the reward "
            f"{config.reward.name} is only logged"
        )
    source = base_policy(config, cast, folder)
    assemble.check_model(config, cast, source)
    source = first_policy(config, cast, folder, source, observer=observer, stopping=stopping)
    rig = _rig(config, folder, cast, source, observer)
    try:
        done = _resume(rig)
        if _evaluation_is_due(rig, done):
            _evaluate(rig, done)
        if config.train.steps == 0:
            _save(rig, 0)
        finished = _loop(rig, done, stopping)
    finally:
        rig.sampler.close()
        deepspeed.close(rig.learner)
        for tracker in rig.trackers:
            tracker.close()
    return finished


def _rig(config: RunConfig, folder: RunFolder, cast: Cast, source: str, observer: Observer) -> Rig:
    observer.phase("loading the policy", None)
    sampler = assemble.sampler(config, source)
    return Rig(
        config=config,
        folder=folder,
        cast=cast,
        problems=assemble.problems(cast.task, "train"),
        source=source,
        sampler=sampler,
        engine=assemble.engine(
            config,
            cast,
            renderer=assemble.renderer(config, cast, source),
            sampler=sampler,
            temperature=config.rollout.temperature,
        ),
        learner=open_learner(
            config,
            source,
            config.learner.optimiser,
            total_steps=config.train.steps * config.algorithm.updates_per_batch,
        ),
        observer=observer,
        trackers=(JsonlTracker(folder.metrics), *assemble.trackers(config)) if ranks.rank() == 0 else (),
    )


def _log(rig: Rig, step: int, metrics: Mapping[str, float]) -> None:
    for tracker in rig.trackers:
        try:
            tracker.log(step, metrics)
        except CondenseError:
            raise
        except Exception as error:  # the boundary to a tracker
            name = type(tracker).__name__
            raise RunError(f"logging step {step} with {name}: {type(error).__name__}: {error}") from error


def _resume(rig: Rig) -> int:
    """Load the newest checkpoint, if there is one, and send its weights; the steps already taken.

    Only now is the configuration written: one that the checkpoint refused must not stay.
    """
    newest = checkpoint.latest(rig.folder.checkpoints)
    done = 0
    if newest is not None:
        done = int(checkpoint.load(rig.learner, newest)["step"])
        rig.observer.say(f"resumed after step {done} from {newest}")
    if ranks.rank() == 0:
        rig.folder.truncate_after(-1 if newest is None else done)
        write_atomically(rig.folder.config, dump_config(rig.config))
    ranks.barrier()
    rig.sampler.update_weights(gathered(rig.learner), done)
    return done


def _evaluation_is_due(rig: Rig, done: int) -> bool:
    """Whether the policy after ``done`` steps is still to be evaluated: at the start, or where a run was stopped."""
    every = rig.config.train.eval_every
    if done and done < rig.config.train.steps and not (every and done % every == 0):
        return False
    there = any("eval/success" in line for line in read_metrics(rig.folder.metrics) if line["step"] == done)
    return not ranks.from_first(there)


def _loop(rig: Rig, done: int, stopping: Callable[[], bool]) -> bool:
    plan = rig.config.train
    for step in range(done + 1, plan.steps + 1):
        metrics = _step(rig, step)
        _log(rig, step, metrics)
        rig.observer.step(step, metrics)
        last = step == plan.steps
        stop = ranks.any_rank(stopping())
        if last or (plan.eval_every and step % plan.eval_every == 0 and not stop):
            _evaluate(rig, step)
        if last or stop or (plan.save_every and step % plan.save_every == 0):
            _save(rig, step)
        if stop and not last:
            return False
    return True


def _step(rig: Rig, step: int) -> dict[str, float]:
    """One batch of problems to one optimiser step; the metrics of it."""
    began = time.monotonic()
    scored = _roll_out(rig, step)
    tell_failures(scored, rig.observer.say)
    sampled = time.monotonic()
    scores, advantage_NK, weight_NK = _credit(rig, scored)
    _record(rig, step, scored, advantage_NK, weight_NK)
    update = _update(rig, step, rows_of(scored, advantage_NK, weight_NK))
    learned = time.monotonic()
    rig.sampler.update_weights(gathered(rig.learner), step)
    ended = time.monotonic()
    return {
        **_over_ranks(_describe(scored, scores, advantage_NK)),
        **update,
        "seconds": ended - began,
        "seconds/rollout": sampled - began,
        "seconds/learn": learned - sampled,
        "seconds/sync": ended - learned,
    }


def _roll_out(rig: Rig, step: int) -> tuple[ScoredTrajectory, ...]:
    """The scored trajectories of this rank's share of a step's problems, whole groups, each written as it finishes."""
    plan = rig.config.train
    chosen = indices(seed=rig.config.seed, step=step - 1, count=plan.problems_per_step, size=len(rig.problems))
    batch = named([rig.problems[index] for index in chosen])
    mine = dict(list(batch.items())[ranks.rank() :: ranks.world_size()])
    path = rig.folder.trajectories(step)
    rig.observer.phase(f"step {step}: sampling", len(mine) * plan.samples_per_problem)

    def finished(one: ScoredTrajectory) -> None:
        write_trajectory(path, one)
        rig.observer.advance()

    return asyncio.run(
        collect(
            mine,
            samples=plan.samples_per_problem,
            environment=rig.cast.task.environment,
            engine=rig.engine,
            reward=rig.cast.reward,
            run_seed=rig.config.seed,
            step=step,
            on_scored=finished,
        )
    )


def _credit(rig: Rig, scored: Sequence[ScoredTrajectory]) -> tuple[Scores, Tensor, Tensor]:
    """Scores, advantage and token weight of every turn; denominators count all trajectories of all ranks."""
    algorithm, rollout = rig.config.algorithm, rig.config.rollout
    scores = scores_of(scored)
    advantage_NK = rig.cast.estimator(scores)
    tokens_NK = turn_tokens(scored)
    weight_NK = token_weights(
        algorithm.aggregation,
        tokens_NK,
        totals=Totals(*ranks.sum_over_ranks(totals(tokens_NK, scores.turns_N))),
        max_tokens=algorithm.aggregation_tokens or rollout.max_turns * rollout.max_output_tokens,
    )
    return scores, advantage_NK, weight_NK


def _record(rig: Rig, step: int, scored: Sequence[ScoredTrajectory], advantage_NK: Tensor, weight_NK: Tensor) -> None:
    rows = [
        Credit(
            trajectory=one.trajectory.id,
            advantages=tuple(advantage_K[: len(one.trajectory.turns)]),
            weights=tuple(weight_K[: len(one.trajectory.turns)]),
        )
        for one, advantage_K, weight_K in zip(scored, advantage_NK.tolist(), weight_NK.tolist(), strict=True)
    ]
    everybody = [credit for share in ranks.gather(rows) for credit in share]
    if ranks.rank() == 0:
        write_credit(rig.folder.credit(step), everybody)


def _update(rig: Rig, step: int, rows: Sequence[Segment]) -> dict[str, float]:
    """The optimiser steps of a batch; none if no rank has a row, since there is no gradient."""
    (count,) = ranks.sum_over_ranks([len(rows)])
    if count == 0:
        return {"rows": 0.0}
    rig.observer.phase(f"step {step}: learning", None)
    packed = pack([len(row.token_ids) for row in rows], rig.config.learner.tokens_per_micro_batch)
    batches = [collate([rows[index] for index in batch]) for batch in packed]
    loss = partial(_policy_loss, rig.cast.loss)
    stats: dict[str, float] = {}
    for _ in range(rig.config.algorithm.updates_per_batch):
        stats = deepspeed.optimise(rig.learner, batches, loss, temperature=_learning_temperature(rig.config))
    return {"rows": float(count), **stats}


def _policy_loss(loss: Callable[..., TokenLoss], logp_T: Tensor, batch: PackedBatch) -> TokenLoss:
    return loss(logp_T, batch.logprobs, batch.advantages)


def _learning_temperature(config: RunConfig) -> float:
    """The log-probabilities to learn from are those of the distribution sampled from; greedy ones are taken at 1."""
    return config.rollout.temperature or 1.0


def _describe(scored: Sequence[ScoredTrajectory], scores: Scores, advantage_NK: Tensor) -> dict[str, float]:
    signal = group_signal(scores.total_N, scores.group_N, advantage_NK, correct_N=scores.correct_N)
    return {
        **summarise(scored),
        "groups_of_equal_reward": signal.zero_variance_groups,
        "trajectories_without_advantage": signal.zero_advantage,
        "correct_with_negative_advantage": signal.correct_negative,
    }


def _over_ranks(mine: Mapping[str, float]) -> dict[str, float]:
    """The metrics of all ranks as one, by the mean of their means: each has equally many trajectories.

    A share of *some* trajectories (the components that only some have, the correct ones) is weighted by ranks, then.
    """
    shares = ranks.gather(dict(mine))
    found = {key: [share[key] for share in shares if key in share] for share in shares for key in share}
    merged = {key: fmean(values) for key, values in found.items()}
    return merged | {"trajectories": sum(found["trajectories"]), "context_tokens_max": max(found["context_tokens_max"])}


def _evaluate(rig: Rig, step: int) -> None:
    """Evaluate on the held-out problems; before and after training on the variants too."""
    wanted = evaluations(rig.config)
    if 0 < step < rig.config.train.steps:
        wanted = dict(list(wanted.items())[:1])
    results = [
        evaluate(
            name,
            config,
            sampler=rig.sampler,
            source=rig.source,
            observer=rig.observer,
            on_scored=lambda one: None,
        )
        for name, config in wanted.items()
    ]
    _log(rig, step, {key: value for result in results for key, value in flat(result).items()})
    rig.observer.evaluated(step, results)


def _save(rig: Rig, step: int) -> None:
    """Publish a checkpoint with the policy as a Hugging Face folder inside."""

    def export(folder: Path) -> None:
        save_policy(
            folder / "model",
            model_config=rig.learner.module.policy.config,
            named_tensors=gathered(rig.learner),
            tokenizer=load_tokenizer(rig.source),
            stop_ids=end_ids(rig.source),
        )

    rig.observer.phase("saving a checkpoint", None)
    checkpoint.save(rig.learner, rig.folder.checkpoints, step=step, state={"step": step}, extra=export)
    checkpoint.prune(rig.folder.checkpoints, rig.config.train.keep_checkpoints)


def _check_ranks(config: RunConfig) -> None:
    size = ranks.world_size()
    if config.train.problems_per_step % size:
        raise ConfigError(
            f"checking train.problems_per_step: {config.train.problems_per_step} problems do not divide over {size} "
            f"ranks; choose a multiple, so that every rank rolls out whole groups."
        )
