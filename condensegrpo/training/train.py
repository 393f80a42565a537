"""The training loop. One step reads as its sentence: take trajectories, give credit, update, send the new weights.

problems ─▶ groups of trajectories ─▶ scores ─▶ advantages ─▶ segments ─▶ one optimiser step ─▶ sampler
"""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from condensegrpo.algorithms.credit import rows_of
from condensegrpo.algorithms.names import SEE_TURN_REWARDS
from condensegrpo.algorithms.staleness import weights_go
from condensegrpo.assembly import assemble
from condensegrpo.assembly.assemble import Components
from condensegrpo.config.schema import RunConfig, dump_config, evaluations
from condensegrpo.core.errors import CondenseError, ConfigError, RunError
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols import Sleeps
from condensegrpo.evaluation.evaluate import evaluate
from condensegrpo.evaluation.figures import flat
from condensegrpo.learner import checkpoint, deepspeed, ranks
from condensegrpo.learner.policy import end_ids, load_tokenizer, save_policy
from condensegrpo.learner.weights import gathered, save_adapter
from condensegrpo.storage.run_folder import RunFolder, read_metrics, write_atomically, write_trajectory
from condensegrpo.training.credit_step import give_credit, metrics_of, record_credit
from condensegrpo.training.initial_policy import base_policy, first_policy
from condensegrpo.training.prefetch_files import restored, write_batches
from condensegrpo.training.prefetching import RolloutPrefetcher
from condensegrpo.training.rig import Rig, set_up, take_down
from condensegrpo.training.rollout_step import Sampled, sampled_by
from condensegrpo.training.update_step import update


def train(
    config: RunConfig, components: Components, folder: RunFolder, *, observer: Observer, stopping: Callable[[], bool]
) -> bool:
    """Run, or go on with, the training of a run folder.

    Args:
        components: what ``assemble.check`` made of the configuration.
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
    for text in _ignored(config):
        observer.say(text)
    source = base_policy(config, components, folder)
    assemble.check_model(config, components, source)
    source = first_policy(config, components, folder, source, observer=observer, stopping=stopping)
    rig = set_up(config, folder, components, source, observer)
    try:
        done, sampled = _resume(rig)
        with RolloutPrefetcher(rig, sampled) as prefetcher:
            if _evaluation_is_due(rig, done):
                _evaluate(rig, done)
            if config.train.steps == 0:
                _save(rig, prefetcher, 0)
            finished = _loop(rig, prefetcher, done, stopping)
    finally:
        take_down(rig)
    return finished


def _ignored(config: RunConfig) -> Iterator[str]:
    """What a configuration asks for and its estimator does not look at."""
    if config.algorithm.estimator != "efficient":
        return
    if config.reward.name != "correct":
        yield (
            f"the estimator efficient learns from correctness and context tokens: the total of the reward "
            f"{config.reward.name} is only logged"
        )
    if "penalise" in config.algorithm.on_stop.values():
        yield (
            "the estimator efficient takes a penalised stop for a wrong answer and no more: algorithm.stop_penalty, "
            "which comes off the total reward, changes nothing"
        )


def _tell_unseen_turn_rewards(rig: Rig, metrics: Mapping[str, float]) -> bool:
    """Say that the turn rewards of a step were only logged, if so it was."""
    name = rig.config.algorithm.estimator
    unseen = "turn_reward" in metrics and name not in SEE_TURN_REWARDS
    if unseen:
        rig.observer.say(
            f"turn rewards are only logged: the estimator {name} does not see them; "
            f"{', '.join(sorted(SEE_TURN_REWARDS))} do"
        )
    return unseen


def _log(rig: Rig, step: int, metrics: Mapping[str, float]) -> None:
    for tracker in rig.trackers:
        try:
            tracker.log(step, metrics)
        except CondenseError:
            raise
        except Exception as error:  # the boundary to a tracker
            name = type(tracker).__name__
            raise RunError(f"logging step {step} with {name}: {type(error).__name__}: {error}") from error


def _resume(rig: Rig) -> tuple[int, dict[int, Sampled]]:
    """Load the newest checkpoint, if there is one, and send its weights.

    Only now is the configuration written: one that the checkpoint refused must not stay.

    Returns:
        The steps already taken, and the batches that were sampled ahead, by step.
    """
    newest = checkpoint.latest(rig.folder.checkpoints)
    done, sampled = 0, dict[int, Sampled]()
    if newest is not None:
        state = checkpoint.load(rig.learner, newest)
        done = int(state["step"])
        rig.observer.say(f"resumed after step {done} from {newest}")
        sampled = restored(rig, newest, state.get("sampled_by"))
    if ranks.rank() == 0:
        rig.folder.truncate_after(-1 if newest is None else done)
        write_atomically(rig.folder.config, dump_config(rig.config))
    ranks.barrier()
    for step, batch in sampled.items():
        for one in (*batch.kept, *batch.masked, *batch.dropped):
            write_trajectory(rig.folder.trajectories(step), one)
    rig.sampler.update_weights(gathered(rig.learner), done)
    return done, sampled


def _evaluation_is_due(rig: Rig, done: int) -> bool:
    """Whether the policy after ``done`` steps is still to be evaluated: at the start, or where a run was stopped."""
    every = rig.config.train.eval_every
    if done and done < rig.config.train.steps and not (every and done % every == 0):
        return False
    there = any("eval/success" in line for line in read_metrics(rig.folder.metrics) if line["step"] == done)
    return not ranks.from_first(there)


def _loop(rig: Rig, prefetcher: RolloutPrefetcher, done: int, stopping: Callable[[], bool]) -> bool:
    plan, told = rig.config.train, False
    for step in range(done + 1, plan.steps + 1):
        metrics = _step(rig, prefetcher, step)
        told = told or _tell_unseen_turn_rewards(rig, metrics)
        _log(rig, step, metrics)
        rig.observer.step(step, metrics)
        last = step == plan.steps
        stop = ranks.any_rank(stopping())
        if last or (plan.eval_every and step % plan.eval_every == 0 and not stop):
            _send_weights(rig, prefetcher, step)
            _evaluate(rig, step)
        if last or stop or (plan.save_every and step % plan.save_every == 0):
            _save(rig, prefetcher, step)
        if stop and not last:
            return False
    return True


def _step(rig: Rig, prefetcher: RolloutPrefetcher, step: int) -> dict[str, float]:
    """One batch of problems to one optimiser step; the metrics of it."""
    began = time.monotonic()
    sampled = prefetcher.take(step)
    if prefetcher.idle and isinstance(rig.sampler, Sleeps):
        rig.sampler.sleep()
    taken = time.monotonic()
    credit = give_credit(rig, sampled.kept)
    record_credit(rig, step, sampled, credit)
    rows = rows_of(sampled.kept, credit.advantage_NK, credit.weight_NK, idle=rig.reference is not None)
    rig.observer.phase(f"step {step}: learning", None)
    stats = update(rig, rows)
    learned = time.monotonic()
    waited = _send_weights(rig, prefetcher, step) if weights_go(step, rig.config.rollout.staleness) else 0.0
    ended = time.monotonic()
    return {
        **metrics_of(rig, step, sampled, credit),
        **stats,
        "seconds": ended - began,
        "seconds/rollout": taken - began + waited,
        "seconds/learn": learned - taken,
        "seconds/sync": ended - learned - waited,
    }


def _send_weights(rig: Rig, prefetcher: RolloutPrefetcher, step: int) -> float:
    """Give the sampler the weights after ``step``, if it has others; the seconds until nothing was sampled any more."""
    began = time.monotonic()
    if rig.sampler.version == step:
        return 0.0
    prefetcher.finish()
    waited = time.monotonic() - began
    rig.sampler.update_weights(gathered(rig.learner), step)
    return waited


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


def _save(rig: Rig, prefetcher: RolloutPrefetcher, step: int) -> None:
    """Publish a checkpoint with the policy as a Hugging Face folder inside, and adapters as a PEFT folder.

    What is sampled ahead goes in as well: sampled anew after a resume it would be of newer weights.
    """
    sampled = prefetcher.finish()

    def export(folder: Path) -> None:
        write_batches(folder, sampled)
        save_policy(
            folder / "model",
            model_config=rig.learner.module.policy.config,
            named_tensors=gathered(rig.learner),
            tokenizer=load_tokenizer(rig.source),
            stop_ids=end_ids(rig.source),
        )
        if rig.config.model.lora is not None:
            save_adapter(folder / "adapter", rig.learner)

    rig.observer.phase("saving a checkpoint", None)
    state = {"step": step, "sampled_by": sampled_by(rig.config)}
    checkpoint.save(rig.learner, rig.folder.checkpoints, step=step, state=state, extra=export)
    checkpoint.prune(rig.folder.checkpoints, rig.config.train.keep_checkpoints)


def _check_ranks(config: RunConfig) -> None:
    size = ranks.world_size()
    if config.train.problems_per_step % size:
        raise ConfigError(
            f"checking train.problems_per_step: {config.train.problems_per_step} problems do not divide over {size} "
            f"ranks; choose a multiple, so that every rank rolls out whole groups."
        )
