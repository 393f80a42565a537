"""Builds and checks the components of a configuration, so that a wrong one stops before any model is loaded."""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from typing import Any

from condensegrpo.assembly import plugins, runtime
from condensegrpo.assembly.components import Components, problems
from condensegrpo.assembly.learning_signal import advantage_estimator, objective
from condensegrpo.assembly.objects import NO_OBJECTS, Objects, check_objects
from condensegrpo.assembly.parts import (
    build_condenser,
    build_reward,
    build_sandbox,
    build_task,
    build_toolbox,
    check_tracker,
    shared_options,
)
from condensegrpo.assembly.scorers import check_scorers
from condensegrpo.config.checks import check_values
from condensegrpo.config.load import evaluations
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.condenser import Condenser
from condensegrpo.core.defaults import overrides
from condensegrpo.core.errors import ConfigError, DataError
from condensegrpo.core.plugins import load_plugin
from condensegrpo.core.protocols.sampler import Sampler


def build(config: RunConfig, base: Components | None = None, objects: Objects = NO_OBJECTS) -> Components:
    """Build the components of a configuration and of its evaluations, and check all that needs no model.

    Args:
        base, objects: see ``build_components``.
    """
    built = build_components(config, base, objects)
    for split in ("train", "eval"):
        built.problems(split)
    named = {name: build_components(varied, built, objects) for name, varied in evaluations(config).items()}
    for name, each in named.items():
        _check_ids(name, each)
    runtime.check_sampler(config, objects)
    check_objects(config, objects)
    sampler = type(objects[name]) if (name := config.sampler.name) in objects else load_plugin("samplers", name)
    check_scorers(built.condenser.scorers, sampler, name)
    for each in (built, *named.values()):
        _check_workers(each, sampler)
    for tracker in config.trackers:
        plugins.check_plugin("trackers", tracker.name, tracker.options)
        check_tracker(tracker.name)
    return replace(built, evaluations=named)


def _check_workers(components: Components, sampler: type) -> None:
    """Check that worker processes can reach all models."""
    config, scorers = components.config, components.condenser.scorers
    if not config.rollout.workers.processes:
        return
    found = f"checking rollout.workers: found processes={config.rollout.workers.processes}, and"
    if not overrides(sampler, Sampler.client):
        raise ConfigError(
            f"{found} the model of the sampler {config.sampler.name} is in this process. Set "
            f"rollout.workers.processes=0, or sampler.name=vllm_server."
        )
    if scorers:
        raise ConfigError(
            f"{found} the condenser {config.condenser.name} has units scored by {', '.join(scorers)}, a model in this "
            f"process. Set rollout.workers.processes=0, or name another condenser."
        )


def _check_ids(name: str, components: Components) -> None:
    """Check that the problems of an evaluation have ids of their own: its figures are by problem."""
    evaluated = components.held_out()
    ((most, times),) = Counter(problem.id for problem in evaluated).most_common(1)
    if times > 1:
        raise DataError(
            f"reading the problems of the evaluation {name}: found {times} with the id {most!r}, wanted an id for each "
            f"problem. Give every Problem of the task an id of its own."
        )


def build_components(config: RunConfig, base: Components | None = None, objects: Objects = NO_OBJECTS) -> Components:
    """Build the components of a configuration without reading its data.

    Args:
        base: components of another configuration; parts whose settings are the same are shared. The condenser is not,
            since its counts belong to the rollouts that it serves; an object is, unless it counts.
        objects: plug-ins that were given as objects, by the names that the configuration has for them.
    """
    check_values(config)

    def part(name: str, settings: Callable[[RunConfig], object], make: Callable[[], Any]) -> Any:  # noqa: ANN401
        """The part of ``base``, if it was made from the same settings, or a new one."""
        same = base is not None and settings(base.config) == settings(config)
        return getattr(base, name) if same else make()

    sandbox = part("sandbox", lambda of: of.sandbox, lambda: build_sandbox(config))
    task = part("task", lambda of: (of.task, tuple(shared_options(of))), lambda: build_task(config, objects))
    condenser = build_condenser(config.condenser, objects)
    if base is not None and condenser is base.condenser and type(condenser).counts is not Condenser.counts:
        condenser = deepcopy(condenser)  # of one object that counts, every evaluation has a copy with its own counts
    return Components(
        config=config,
        task=task,
        data=base.data if base is not None and base.task is task else cache(partial(problems, task)),
        reward=part(
            "reward", lambda of: (of.reward, of.sandbox), lambda: build_reward(config.reward, sandbox, objects)
        ),
        condenser=condenser,
        toolbox=part(
            "toolbox",
            lambda of: (of.rollout.tools, of.sandbox, of.condenser, of.rollout.condense),
            lambda: build_toolbox(config, sandbox, condenser, objects),
        ),
        sandbox=sandbox,
        objects=objects,
        estimator=part(
            "estimator",
            lambda of: (of.estimator, of.algorithm.advantage, of.rollout.limits.max_context_tokens),
            lambda: advantage_estimator(config),
        ),
        objective=part("objective", lambda of: of.algorithm, lambda: objective(config.algorithm)),
    )
