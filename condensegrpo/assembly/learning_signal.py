"""Builds the learning signal of a configuration: the estimator of advantages and the objective.

Estimators and losses are tables of the package, not plug-ins. Every choice is tried once on toy values before a model
is loaded.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial

import torch

from condensegrpo.algorithms.advantages import ESTIMATORS
from condensegrpo.algorithms.credit import Estimator, Scores
from condensegrpo.algorithms.losses import LOSSES
from condensegrpo.algorithms.objective import Minimised, Objective, PolicyLoss, Tokenwise
from condensegrpo.algorithms.packing import dummy
from condensegrpo.config.schema import AlgorithmSettings, RunConfig
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.suggestions import did_you_mean

# two trajectories of one turn and one token each, on which options are tried
TOY_SCORES = Scores(
    total_N=torch.tensor([1.0, 0.0]),
    score_N=torch.tensor([1.0, 0.0]),
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
COLUMNS = ("_N", "_NK", "_T")  # suffixes of the arguments that the engine supplies, not the configuration
TOY_TOKENS = (*torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [1.0, -1.0]]), torch.tensor([0, 1]))


def advantage_estimator(config: RunConfig) -> Estimator:
    """The estimator of advantages that the configuration names, or the default for its reward, with its options.

    Raises:
        ConfigError: the estimator is unknown, or refuses an option.
    """
    name, options = config.estimator, config.algorithm.advantage.options
    _check_known("algorithm.advantage.estimator", ESTIMATORS, name, options)
    estimator = Estimator(name, config.estimator_options)
    _try_out("algorithm.advantage.options", partial(estimator, TOY_SCORES))
    return estimator


def objective(algorithm: AlgorithmSettings) -> Minimised:
    """What an optimiser step minimises: the loss, its importance correction and its KL term.

    Raises:
        ConfigError: the loss is unknown, or it or the importance correction refuses an option.
    """
    _check_known("algorithm.loss.name", LOSSES, algorithm.loss.name, algorithm.loss.options)
    loss = PolicyLoss(algorithm.loss.name, algorithm.loss.options)
    _try_out("algorithm.loss.options", partial(loss, *TOY_TOKENS))
    cap = algorithm.importance.cap or 0.0  # None only where no file was loaded
    built = Objective(
        loss=loss,
        importance_cap=cap,
        importance_level=algorithm.importance.level,
        importance_mode=algorithm.importance.mode,
        first_update=bool(cap) and algorithm.updates_per_batch == 1,
        kl_coefficient=algorithm.kl.coefficient,
        kl_estimator=algorithm.kl.estimator,
    )
    _try_out("algorithm.importance", partial(built, torch.tensor([-1.0]), dummy()))
    return Tokenwise(built) if built.tokenwise else built


def _try_out(key: str, call: Callable[[], object]) -> None:
    """Call a function of the maths once on toy values, so that options it refuses are found early."""
    try:
        call()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"checking {key}: {str(error).removesuffix('.')}.") from error


def _check_known(
    key: str, table: Mapping[str, Callable[..., object]], name: str, options: Mapping[str, object]
) -> None:
    """Check that a table has a function of this name, and the function these options."""
    if name not in table:
        raise ConfigError(f"checking {key}: {name!r} is unknown. {did_you_mean(name, table)}Known: {', '.join(table)}.")
    known = [
        parameter.name
        for parameter in inspect.signature(table[name]).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not parameter.name.endswith(COLUMNS)
    ]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"checking {key.rpartition('.')[0]}.options: {name} has no option {option!r}. "
                f"{did_you_mean(option, known)}It has: {', '.join(known) or 'none'}."
            )
