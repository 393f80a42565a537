"""Compare condensers: evaluate one policy under each of them and each budget, on equal problems and random streams."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from condensegrpo.assembly.build import build
from condensegrpo.assembly.components import Components
from condensegrpo.assembly.model_checks import check_model
from condensegrpo.config.load import vary
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols import Sampler
from condensegrpo.core.trajectory import ScoredTrajectory
from condensegrpo.evaluation.comparison import Comparison, Contender, Outcome, Played, comparison, outcome_of
from condensegrpo.evaluation.evaluate import evaluate
from condensegrpo.learner.policy import positions

UNBOUNDED = "full"  # the condenser that drops nothing: it is compared once, and no budget is set to it


def contenders(
    condensers: Sequence[tuple[str, Mapping[str, Any]]], budgets: Sequence[int], config: RunConfig
) -> tuple[Contender, ...]:
    """Who takes part: every condenser under every budget, ``full`` once and without one.

    A condenser that is the configuration's own and is given no options has those of the configuration. Without budgets
    there is one: ``rollout.limits.max_context_tokens``.

    Raises:
        ConfigError: one is named twice, or there is none.
    """
    own = config.condenser
    filled = [(name, options or (dict(own.options) if name == own.name else {})) for name, options in condensers]
    found = tuple(
        Contender(condenser=name, options=options, budget=budget)
        for name, options in filled
        for budget in ((None,) if name == UNBOUNDED else budgets or (config.rollout.limits.max_context_tokens,))
    )
    names = [one.name for one in found]
    twice = [name for place, name in enumerate(names) if name in names[:place]]
    if twice or not found:
        raise ConfigError(f"comparing condensers: {f'{twice[0]} is named twice' if twice else 'none is named'}.")
    return found


def configured(config: RunConfig, contender: Contender, source: str) -> RunConfig:
    """The configuration of one contender."""
    budget = _unbounded(config, source) if contender.budget is None else contender.budget
    plugin = {"name": contender.condenser, "options": dict(contender.options)}
    return vary(config, [f"condenser={json.dumps(plugin)}", f"rollout.limits.max_context_tokens={budget}"])


Entrant = tuple[Contender, Components]


def compare(
    entrants: Sequence[Entrant],
    *,
    sampler: Sampler,
    source: str,
    observer: Observer,
    on_scored: Callable[[Contender, ScoredTrajectory], None],
) -> Comparison:
    """Evaluate every contender, one after another, so that the seconds of one do not depend on another.

    Args:
        entrants: as ``check`` returned them.
        source: the folder or Hub id of the policy.
        on_scored: sees every trajectory.
    """
    return comparison(source, [_play(entrant, sampler, source, observer, on_scored) for entrant in entrants])


def check(config: RunConfig, contenders: Sequence[Contender], source: str) -> tuple[Entrant, ...]:
    """Build every contender's components and check them against the policy, before any weights are loaded.

    Raises:
        ConfigError: a condenser is unknown or refuses its options, or a budget does not fit question or model.
    """
    entrants: list[Entrant] = []
    base = build(config)
    for contender in contenders:
        varied = configured(config, contender, source)
        parts = build(varied, base)
        check_model(parts, source)
        entrants.append((contender, parts))
    return tuple(entrants)


def _play(
    entrant: Entrant,
    sampler: Sampler,
    source: str,
    observer: Observer,
    on_scored: Callable[[Contender, ScoredTrajectory], None],
) -> Played:
    contender, parts = entrant
    outcomes: list[Outcome] = []

    def finished(one: ScoredTrajectory) -> None:
        outcomes.append(outcome_of(one))
        on_scored(contender, one)

    result = evaluate(
        contender.name,
        parts,
        sampler=sampler,
        source=source,
        observer=observer,
        on_scored=finished,
    )
    return Played(contender=contender, outcomes=tuple(outcomes), evaluation=result)


def _unbounded(config: RunConfig, source: str) -> int:
    """The largest context that model and micro-batches have room for beside a reply."""
    room = min(positions(source) or config.learner.tokens_per_micro_batch, config.learner.tokens_per_micro_batch)
    return room - config.rollout.limits.max_output_tokens
