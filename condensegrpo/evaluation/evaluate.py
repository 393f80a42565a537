"""Evaluates a policy on held-out problems, alone or under several condensers, and keeps what it finds.

The evaluations of a run's policy are kept in the folder of the run, others in a new folder.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec
from pathlib import Path

from condensegrpo.assembly.build import build
from condensegrpo.assembly.components import Components
from condensegrpo.assembly.policy import in_use, initial_of
from condensegrpo.assembly.preflight import check_model, check_writer_needed
from condensegrpo.assembly.runtime import evaluation_temperature, open_sampler, open_writers, provenance, use_threads
from condensegrpo.assembly.workers import RolloutPlayers
from condensegrpo.config.load import HELD_OUT, vary
from condensegrpo.config.schema import RunConfig
from condensegrpo.config.use import NO_OBJECTS, Objects
from condensegrpo.core.background_loop import PLUGIN_SECONDS, BackgroundLoop, Watch
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.evaluation import Evaluation
from condensegrpo.core.observer import Observer
from condensegrpo.core.process import temporary_folder
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.episodes.failures import check_failures, failures_of
from condensegrpo.episodes.group import problem_groups
from condensegrpo.evaluation.figures import (
    Comparison,
    Contender,
    ContenderResult,
    comparison,
    contender_result,
    evaluation_of,
)
from condensegrpo.learner.model_folder import max_positions, save_tokenizer, trained_steps
from condensegrpo.storage.evaluations import destination_of, kept_if_begun, new_name, store_evaluation
from condensegrpo.storage.media import MediaFolder
from condensegrpo.storage.run_folder import MANIFEST, RunFolder, evaluation_file
from condensegrpo.storage.trajectories import part_file, start_file, write_trajectories

EVALUATION_STEP = -1  # names the random streams of evaluations apart from those of training


def evaluate_variant(
    name: str,
    components: Components,
    *,
    players: RolloutPlayers,
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
        file: for the trajectories, which replace those of an earlier evaluation; each rank writes a part.
    """
    from condensegrpo.learner import ranks  # imports torch

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
        on_scored(trajectory)

    watch = Watch(config.rollout.limits.turn_seconds, observer.notice)
    with BackgroundLoop("evaluation", close_seconds=PLUGIN_SECONDS, watch=watch) as loop:
        scored = loop.run(
            player.play(
                groups,
                samples=config.evaluate.samples,
                run_seed=config.seed,
                step=EVALUATION_STEP,
                on_scored=finished,
            )
        )
    if file is not None:
        write_trajectories(part_file(file, ranks.rank()), scored, sampled_with)
    check_failures(ranks.gather(failures_of(scored)), observer, max_failed=config.train.max_failed)
    figures = [each for of_rank in ranks.gather([each.figures for each in scored]) for each in of_rank]
    seconds = time.monotonic() - began
    return evaluation_of(name, figures, seed=config.seed, seconds=seconds, condensing=player.condensing_seconds)


@contextmanager
def opened_policy(
    config: RunConfig,
    source: str,
    *,
    media: MediaFolder | None = None,
    objects: Objects = NO_OBJECTS,
    observer: Observer | None = None,
) -> Iterator[RolloutPlayers]:
    """The players of a policy: a model folder or Hub id. A sampler among ``objects`` is not closed at the end.

    Pictures are stored in ``media``, by default in a folder that is removed at the end. A checkpoint's files are
    compared with their hashes, and its run does not remove it meanwhile.
    """
    given = config.sampler.name in objects
    with ExitStack() as opened:
        opened.enter_context(in_use(source))
        if not given or find_spec("torch") is not None:
            use_threads(config)
        if not given or ((Path(source).parent / MANIFEST).is_file() and find_spec("deepspeed") is not None):
            from condensegrpo.learner.checkpoint import verify_model  # imports torch and DeepSpeed, in seconds

            verify_model(Path(source))
        if media is None:
            media = MediaFolder(opened.enter_context(temporary_folder("media")))
        sampler = open_sampler(config, source, objects=objects, media=media, observer=observer)
        if not given:
            opened.enter_context(closing(sampler))
        writers = open_writers([config], initial_of(source, config), media)
        yield opened.enter_context(closing(RolloutPlayers(sampler, source, media, writers=writers)))


def evaluate_policy(
    components: Components, source: str, *, save: Path | None, run: Path | None, observer: Observer, command: str
) -> Evaluation:
    """Evaluate a policy on the held-out problems, and keep trajectories and figures.

    Args:
        source: the model folder or Hub id of the policy.
        save: a new folder for the trajectories, in place of the run's.
        run: the folder of the run that the policy is of, if any.
        command: that started the evaluation, for the file in the run.
    """
    step = trained_steps(source)
    check_writer_needed(components)
    check_model(components, source)
    target = destination_of(save, run, step)
    media = None if target is None else MediaFolder((target if isinstance(target, Path) else target.path) / "media")
    opening = opened_policy(components.config, source, media=media, objects=components.objects, observer=observer)
    with kept_if_begun(save), opening as players:
        if isinstance(target, RunFolder) and step is not None:
            with new_name(target, step) as name:
                stored = target.evaluation(step, name)
                result = evaluate_variant(name, components, players=players, step=step, observer=observer, file=stored)
                store_evaluation(target, step, result, command)
            return result
        if isinstance(target, Path):
            save_tokenizer(source, target)
        file = target / evaluation_file(HELD_OUT) if isinstance(target, Path) else None
        return evaluate_variant(HELD_OUT, components, players=players, step=step, observer=observer, file=file)


UNBOUNDED = "full"  # the condenser that drops nothing: it is compared once, and no budget is set to it


def contenders(
    condensers: Sequence[tuple[str, Mapping[str, object]]], budgets: Sequence[int], config: RunConfig
) -> tuple[Contender, ...]:
    """Who takes part: every condenser under every budget, ``full`` once and without one.

    A condenser that is the configuration's own and is given no options has those of the configuration. Without budgets
    there is one: ``rollout.limits.max_context_tokens``, or what ``rollout.condense.schedule`` leaves evaluations of it.
    """
    defaults = {config.condenser.name: config.condenser.options}
    filled = [(name, dict(options or defaults.get(name, {}))) for name, options in condensers]
    evaluated = config.rollout.condense.budget(config.rollout.limits.max_context_tokens, EVALUATION_STEP)
    entered = tuple(
        Contender(condenser=name, options=options, budget=budget)
        for name, options in filled
        for budget in ((None,) if name == UNBOUNDED else budgets or (evaluated,))
    )
    names = [contender.name for contender in entered]
    twice = [name for index, name in enumerate(names) if name in names[:index]]
    if twice or not entered:
        raise ConfigError(f"comparing condensers: {f'{twice[0]} is named twice' if twice else 'none is named'}.")
    return entered


def contender_config(config: RunConfig, contender: Contender, source: str) -> RunConfig:
    """The configuration of one contender; without a budget the context is as large as model and micro-batches allow."""
    budget = contender.budget
    if budget is None:
        largest = config.learner.tokens_per_micro_batch
        budget = min(max_positions(source) or largest, largest) - config.rollout.limits.max_output_tokens
    plugin = {"name": contender.condenser, "options": dict(contender.options)}
    limits = [f"rollout.limits.max_context_tokens={budget}", "rollout.condense.schedule=[]"]  # a share of it no more
    return vary(config, [f"condenser={json.dumps(plugin)}", *limits])


Entrant = tuple[Contender, Components]


def compare_contenders(
    entrants: Sequence[Entrant],
    *,
    players: RolloutPlayers,
    step: int | None,
    observer: Observer,
    save: Path | None = None,
) -> Comparison:
    """Evaluate every contender, one after another, so that the seconds of one do not depend on another.

    Args:
        entrants: as ``check_contenders`` returned them.
        players: of the policy's sampler.
        step: optimiser steps that it has taken; None: not known.
        save: folder for the trajectories, one file for each contender; None: they are not kept.
    """

    def play(contender: Contender, components: Components) -> ContenderResult:
        scored: list[ScoredTrajectory] = []
        result = evaluate_variant(
            contender.name,
            components,
            players=players,
            step=step,
            observer=observer,
            file=None if save is None else save / evaluation_file(contender.name),
            on_scored=scored.append,
        )
        return contender_result(contender, scored, result)

    return comparison(players.source, [play(*entrant) for entrant in entrants], step=step)


def check_contenders(config: RunConfig, contenders: Sequence[Contender], source: str) -> tuple[Entrant, ...]:
    """Build every contender's components and check them against the policy, before any weights are loaded."""
    base = build(config)
    entrants = tuple((contender, build(contender_config(config, contender, source), base)) for contender in contenders)
    for _, components in entrants:
        check_model(components, source)
    return entrants
