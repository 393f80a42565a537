"""Builds the learning signal of a configuration: the estimator of advantages and the objective.

Both are plug-ins, whose options are validated by their signatures. Every choice is tried on made-up values before a
model is loaded (``condensegrpo.algorithms.invariance``).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from condensegrpo.algorithms.advantages import EstimatorPlugin
from condensegrpo.algorithms.credit import Estimator, Scores
from condensegrpo.algorithms.invariance import check_estimator, check_loss
from condensegrpo.algorithms.losses import COLUMNS, LossPlugin
from condensegrpo.algorithms.objective import Objective, ObjectiveFunction, PerToken
from condensegrpo.algorithms.packing import dummy
from condensegrpo.config.options import validated
from condensegrpo.config.schema import AlgorithmSettings, RunConfig
from condensegrpo.core.errors import ConfigError, PluginError, ScoreError
from condensegrpo.core.failures import at_definition, plugin_code
from condensegrpo.core.plugins import installed, load_plugin
from condensegrpo.core.scored_trajectory import WRITTEN
from condensegrpo.core.wording import did_you_mean
from condensegrpo.episodes.settings import Limits

Plugin = TypeVar("Plugin", EstimatorPlugin, LossPlugin)


def advantage_estimator(config: RunConfig) -> Estimator:
    """The estimator of advantages that the configuration names, or the default for its reward, with its options."""
    settings, plugin = config.algorithm.advantage, _loaded("estimators", config.estimator, EstimatorPlugin)
    low, high = settings.context_anchors or _anchors(config.rollout.limits, settings.options)
    anchors = {name: value for name, value in (("context_low", low), ("context_high", high)) if name in plugin.options}
    where = f"setting up the estimator {config.estimator!r}"
    _check_arguments(plugin.function, where, ("batch",), "all others are keywords: def mine(batch, *, correct_N)")
    options = validated(plugin.function, where, {**anchors, **settings.options}, names=plugin.options)
    _check_group(config, plugin)
    for column in plugin.columns:
        if column not in Scores._fields:
            raise PluginError(
                f"{where}{at_definition(plugin.function)}: there is no column {column!r}. "
                f"{did_you_mean(column, Scores._fields)}Columns are: {', '.join(Scores._fields)}."
            )
    estimator = Estimator(plugin, options)
    _try_out(where + at_definition(plugin.function), partial(check_estimator, estimator))
    return estimator


def _anchors(limits: Limits, options: Mapping[str, object]) -> tuple[float, float]:
    """1/16 and all of the context budget; by price 1/16 of a full turn and ``max_turns`` full turns, uncached."""
    if options.get("cost") != "price":
        return limits.max_context_tokens / 16, float(limits.max_context_tokens)
    weight = options.get("written", WRITTEN)
    weight = weight if isinstance(weight, int | float) else WRITTEN  # another one is refused with the other options
    turn = limits.max_context_tokens + weight * limits.max_output_tokens
    return turn / 16, turn * limits.max_turns


def objective(algorithm: AlgorithmSettings) -> ObjectiveFunction:
    """What an optimiser step minimises: the loss, its importance correction and its KL term."""
    plugin = _loaded("losses", algorithm.loss.name, LossPlugin)
    where = f"setting up the loss {algorithm.loss.name!r}"
    _check_arguments(plugin.function, where, COLUMNS[:3], "turn_T and options are keywords")
    options = validated(plugin.function, where, algorithm.loss.options, names=plugin.options)
    _try_out(where + at_definition(plugin.function), partial(check_loss, plugin, options))
    cap = algorithm.importance.cap or 0.0  # None only where no file was loaded
    built = Objective(
        loss=plugin,
        loss_options=options,
        importance_cap=cap,
        importance_level=algorithm.importance.level,
        importance_mode=algorithm.importance.mode,
        first_update=bool(cap) and algorithm.updates_per_batch == 1,
        kl_coefficient=algorithm.kl.coefficient,
        kl_estimator=algorithm.kl.estimator,
    )
    try:
        built(torch.tensor([-1.0]), dummy())
    except ValueError as error:
        raise ConfigError(f"checking algorithm.importance: {str(error).removesuffix('.')}.") from error
    return PerToken(built) if built.tokenwise else built


def declared(kind: str) -> Mapping[str, EstimatorPlugin | LossPlugin]:
    """The installed estimators or losses by name, as their decorators declare them."""
    return {point.name: load_plugin(kind, point.name) for point in installed(kind)}


def turn_reward_estimators() -> str:
    """The names of the installed estimators that use turn rewards, in alphabetical order."""
    plugins = declared("estimators").items()
    return ", ".join(name for name, plugin in plugins if getattr(plugin, "sees_turn_rewards", False))


def _loaded(kind: str, name: str, expected: type[Plugin]) -> Plugin:
    plugin = load_plugin(kind, name)
    if not isinstance(plugin, expected):
        decorator = "estimator" if expected is EstimatorPlugin else "loss"
        module = "advantages" if expected is EstimatorPlugin else "losses"
        raise PluginError(
            f"setting up {name!r} of the {kind}: found {type(plugin).__name__}, wanted a function that is decorated "
            f"with {decorator} of condensegrpo.algorithms.{module}."
        )
    return plugin


def _check_arguments(function: Callable[..., object], where: str, wanted: Sequence[str], rest: str) -> None:
    """Check the arguments that a function gets by place: a single one of any name, or these and then options."""
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):  # a wrapper that hides what it wraps
        return
    by_place = (each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD))
    names = [each.name for each in by_place]
    fits = len(names) == 1 if len(wanted) == 1 else names[: len(wanted)] == list(wanted)
    if not fits:
        raise PluginError(
            f"{where}{at_definition(function)}: it takes ({', '.join(names)}), wanted ({', '.join(wanted)}); {rest}."
        )


def _check_group(config: RunConfig, plugin: EstimatorPlugin) -> None:
    raw = config.algorithm.advantage.options.get("singleton") == "raw"
    if config.train.samples_per_problem > 1 or not config.train.steps or raw:
        return
    able = [name for name, each in declared("estimators").items() if "singleton" in each.options]
    chosen = "" if "singleton" in plugin.options else f"choose one of {', '.join(able)} and "
    raise ConfigError(
        f"checking train.samples_per_problem: found 1; the estimator {config.estimator} compares at least 2 "
        f"trajectories a problem. Raise it, or {chosen}set algorithm.advantage.options.singleton=raw to train on the "
        f"reward itself."
    )


def _try_out(where: str, check: Callable[[], None]) -> None:
    """Call a plug-in on made-up values, so that what it refuses, or does wrong, is found before a model is loaded."""
    try:
        with plugin_code(where, PluginError):
            check()
    except ScoreError as error:
        raise PluginError(f"{where}: {error}") from error
