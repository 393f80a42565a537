"""Evaluation: sample held-out problems with a policy and compute the figures."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from condensegrpo.assembly.components import Components
from condensegrpo.assembly.players import Players
from condensegrpo.assembly.runtime import evaluation_temperature, provenance
from condensegrpo.core.background_loop import PLUGIN_SECONDS, BackgroundLoop
from condensegrpo.core.evaluation import Evaluation
from condensegrpo.core.observer import Observer
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.episodes.failures import check_failures, failures_of
from condensegrpo.episodes.group import problem_groups
from condensegrpo.evaluation.figures import evaluation_of
from condensegrpo.learner import ranks
from condensegrpo.storage.files import BackgroundWriter, start_file
from condensegrpo.storage.trajectories import write_trajectory

EVALUATION_STEP = -1  # names the random streams of evaluations apart from those of training


def evaluate(
    name: str,
    components: Components,
    *,
    players: Players,
    step: int | None,
    observer: Observer,
    file: Path | None = None,
    on_scored: Callable[[ScoredTrajectory], None] = lambda _: None,
) -> Evaluation:
    """Evaluate the sampler's policy on the held-out problems of some components; every rank takes its part of them.

    The random streams depend on ``config.seed`` and the problems alone: the same policy gives the same figures.

    Args:
        players: of the policy's sampler.
        step: optimiser steps that the policy has taken; None: not known. It begins the ids of trajectories.
        file: for the trajectories as they finish; created again, since a run may have been killed while it evaluated.

    Raises:
        TooManyFailed: more than ``train.max_failed`` of the trajectories failed.
    """
    began, config = time.monotonic(), components.config
    batch = problem_groups(components.held_out(), step=step or 0)
    groups = batch[ranks.rank() :: ranks.world_size()]
    player = players.player(components, temperature=evaluation_temperature(config))
    observer.phase(f"evaluating {name}", len(groups) * config.evaluate.samples)
    if file is not None:
        if ranks.rank() == 0:
            start_file(file)
        ranks.barrier()
    sampled_with = provenance(config, model=players.source, step=step, evaluation=name)

    def finished(trajectory: ScoredTrajectory) -> None:
        observer.advance()
        if file is not None:
            writer.submit(partial(write_trajectory, file, trajectory, sampled_with))
        on_scored(trajectory)

    with BackgroundWriter() as writer, BackgroundLoop("evaluation", close_seconds=PLUGIN_SECONDS) as loop:
        scored = loop.run(
            player.play(
                groups,
                samples=config.evaluate.samples,
                run_seed=config.seed,
                step=EVALUATION_STEP,
                on_scored=finished,
            )
        )
    check_failures(ranks.gather(failures_of(scored)), observer, max_failed=config.train.max_failed)
    figures = [each for of_rank in ranks.gather([each.figures for each in scored]) for each in of_rank]
    seconds = time.monotonic() - began
    return evaluation_of(name, figures, seed=config.seed, seconds=seconds, condensing=player.condensing_seconds)
