"""Compare condensers: evaluate one policy under each of them and each budget, on equal problems and random streams."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from condensegrpo.assembly.build import build
from condensegrpo.assembly.components import Components
from condensegrpo.assembly.model_checks import check_model
from condensegrpo.assembly.players import Players
from condensegrpo.config.load import vary
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.observer import Observer
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.evaluation.comparison import Comparison, Contender, ContenderResult, comparison, contender_result
from condensegrpo.evaluation.evaluate import EVALUATION_STEP, evaluate
from condensegrpo.learner.model_folder import positions
from condensegrpo.storage.run_folder import evaluation_file

UNBOUNDED = "full"  # the condenser that drops nothing: it is compared once, and no budget is set to it


def contenders(
    condensers: Sequence[tuple[str, Mapping[str, object]]], budgets: Sequence[int], config: RunConfig
) -> tuple[Contender, ...]:
    """Who takes part: every condenser under every budget, ``full`` once and without one.

    A condenser that is the configuration's own and is given no options has those of the configuration. Without budgets
    there is one: ``rollout.limits.max_context_tokens``, or what ``rollout.condense.schedule`` leaves evaluations of it.

    Raises:
        ConfigError: one is named twice, or there is none.
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
        budget = min(positions(source) or largest, largest) - config.rollout.limits.max_output_tokens
    plugin = {"name": contender.condenser, "options": dict(contender.options)}
    limits = [f"rollout.limits.max_context_tokens={budget}", "rollout.condense.schedule=[]"]  # a share of it no more
    return vary(config, [f"condenser={json.dumps(plugin)}", *limits])


Entrant = tuple[Contender, Components]


def compare(
    entrants: Sequence[Entrant],
    *,
    players: Players,
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
        result = evaluate(
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
    """Build every contender's components and check them against the policy, before any weights are loaded.

    Raises:
        ConfigError: a condenser is unknown or refuses its options, or a budget does not fit question or model.
    """
    base = build(config)
    entrants = tuple((contender, build(contender_config(config, contender, source), base)) for contender in contenders)
    for _, components in entrants:
        check_model(components, source)
    return entrants
