"""Builds the learning signal that a configuration names: the estimator of advantages and what is minimised.

Estimators and losses are no plug-ins but tables of the package, and every choice is tried out once on toy
values before a model is loaded.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from condensegrpo.algorithms.advantages import ESTIMATORS
from condensegrpo.algorithms.credit import Scores, advantages_of
from condensegrpo.algorithms.losses import KL, LOSSES, OF_TURNS, importance
from condensegrpo.algorithms.objective import Minimised, Tokenwise, bound, corrected, first_update, policy, with_kl
from condensegrpo.algorithms.packing import dummy
from condensegrpo.config.schema import Algorithm, RunConfig
from condensegrpo.core.errors import ConfigError

# two trajectories of one turn and one token each: what the options of estimators and losses are tried out on
TOY_SCORES = Scores(
    total_N=torch.tensor([1.0, 0.0]),
    correct_N=torch.tensor([1.0, 0.0]),
    context_N=torch.tensor([8.0, 8.0]),
    turn_N=torch.tensor([0.0, 0.0]),
    group_N=torch.tensor([0, 0]),
    turns_N=torch.tensor([1, 1]),
    result_turn_N=torch.tensor([-1, -1]),
    truncated_N=torch.tensor([False, False]),
    state_NK=torch.tensor([[0], [0]]),
    act_NK=torch.tensor([[0], [0]]),
)
COLUMNS = ("_N", "_NK", "_T")  # how the arguments end that the engine supplies; no configuration can
TOY_TOKENS = (*torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [1.0, -1.0]]), torch.tensor([0, 1]))


def advantage_estimator(config: RunConfig) -> Callable[[Scores], torch.Tensor]:
    """The advantage of every turn, (N, K), from the scores of trajectories.

    Raises:
        ConfigError: the estimator is unknown, or refuses an option.
    """
    algorithm = config.algorithm
    estimator = _chosen("algorithm.estimator", ESTIMATORS, algorithm.estimator, algorithm.estimator_options)
    options = _estimator_options(config)
    _try_out("algorithm.estimator_options", partial(advantages_of, TOY_SCORES, estimator, options))
    return partial(advantages_of, estimator=estimator, options=options)


def objective(algorithm: Algorithm) -> Minimised:
    """The loss with what the configuration puts around it.

    Raises:
        ConfigError: the loss is unknown, or it or the importance correction refuses an option.
    """
    loss = bound(_chosen("algorithm.loss", LOSSES, algorithm.loss, algorithm.loss_options), algorithm.loss_options)
    _try_out("algorithm.loss_options", partial(loss, *TOY_TOKENS))
    minimised: Minimised = partial(policy, loss=loss)
    if algorithm.importance.cap:
        correction = partial(importance, **algorithm.importance.model_dump())
        minimised = partial(corrected, loss=loss, correction=correction)
        if algorithm.updates_per_batch == 1:
            minimised = partial(first_update, objective=minimised)
    if algorithm.kl.coefficient:
        penalty = KL[algorithm.kl.estimator]
        minimised = partial(with_kl, objective=minimised, penalty=penalty, coefficient=algorithm.kl.coefficient)
    of_turns = algorithm.loss in OF_TURNS or (algorithm.importance.cap and algorithm.importance.level == "turn")
    whole = minimised if of_turns else Tokenwise(minimised)
    _try_out("algorithm.importance", partial(whole, torch.tensor([-1.0]), dummy()))
    return whole


def _estimator_options(config: RunConfig) -> dict[str, Any]:
    """The options of the estimator, with its anchors for ``efficient``, which alone measures contexts by them."""
    given = config.algorithm.estimator_options
    if config.algorithm.estimator != "efficient":
        return given
    budget = config.rollout.max_context_tokens
    low, high = config.algorithm.context_anchors or (budget / 16, float(budget))
    return {"context_low": low, "context_high": high, **given}


def _try_out(key: str, call: Callable[[], object]) -> None:
    """Call a function of the maths once on toy values, so that options it refuses are found early."""
    try:
        call()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"checking {key}: {str(error).removesuffix('.')}.") from error


def _chosen(
    key: str, table: Mapping[str, Callable[..., Any]], name: str, options: Mapping[str, Any]
) -> Callable[..., Any]:
    if name not in table:
        raise ConfigError(f"checking {key}: {name!r} is unknown.{_hint(name, table)} Known: {', '.join(table)}.")
    known = [
        one.name
        for one in inspect.signature(table[name]).parameters.values()
        if one.kind is inspect.Parameter.KEYWORD_ONLY and not one.name.endswith(COLUMNS)
    ]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"checking {key}_options: {name} has no option {option!r}.{_hint(option, known)} "
                f"It has: {', '.join(known) or 'none'}."
            )
    return table[name]


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""
