"""Builds what a configuration names. The only file that loads plug-ins.

``check`` does everything that needs no model, so that a wrong configuration stops the run before one is loaded.
"""

import asyncio
import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from condensegrpo.advantages import ESTIMATORS
from condensegrpo.config import Plugin, RunConfig, WeightedPlugin, parse
from condensegrpo.credit import Estimator
from condensegrpo.errors import ConfigError
from condensegrpo.losses import LOSSES, TokenLoss
from condensegrpo.messages import Message
from condensegrpo.plugins import build, load
from condensegrpo.protocols import Condenser, Environment, Part, Problem, Reward, Sampler, Split, Task, Tool, Tracker
from condensegrpo.rollout.budget import Limits, check_head
from condensegrpo.rollout.episode import Engine
from condensegrpo.rollout.render import Renderer
from condensegrpo.rollout.toolcalls import TOOL_FORMATS, Toolbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """What a run is made of, besides the model."""

    task: Task
    reward: Reward
    condenser: Condenser
    toolbox: Toolbox
    estimator: Estimator
    loss: Callable[..., TokenLoss]


def check(config: RunConfig) -> Cast:
    """Build every plug-in of a configuration and check what can be checked without a model.

    Raises:
        ConfigError: a plug-in, an option, an estimator or a loss is unknown, or figures do not fit together.
    """
    if config.train.samples_per_problem == 1 and config.train.steps:
        raise ConfigError(
            "checking train.samples_per_problem: found 1; a group-relative advantage needs at least 2 "
            "trajectories a problem."
        )
    load("samplers", config.sampler.name)  # built once there is a model
    for tracker in config.trackers:
        load("trackers", tracker.name)
    return Cast(
        task=_task(config),
        reward=_reward(config.reward),
        condenser=build("condensers", config.condenser.name, config.condenser.options),
        toolbox=Toolbox(
            _tools(config),
            format=TOOL_FORMATS[config.rollout.tool_format],
            seconds=config.rollout.tool_seconds,
        ),
        estimator=_chosen(
            "algorithm.estimator", ESTIMATORS, config.algorithm.estimator, config.algorithm.estimator_options
        ),
        loss=partial(
            _chosen("algorithm.loss", LOSSES, config.algorithm.loss, config.algorithm.loss_options),
            **config.algorithm.loss_options,
        ),
    )


def problems(task: Task, split: Split) -> tuple[Problem, ...] | Any:  # noqa: ANN401  any Sequence[Problem]
    """The problems of a split.

    Raises:
        ConfigError: there are none.
    """
    found = task.problems(split)
    if not len(found):
        raise ConfigError(f"reading the {split} problems of the task: found none. Check task.data and task.eval_data.")
    return found


def use_threads(config: RunConfig) -> None:
    """Give torch as many CPU threads as the configuration says."""
    if config.learner.threads is not None:
        torch.set_num_threads(config.learner.threads)


def sampler(config: RunConfig, model_path: str) -> Sampler:
    """The sampler, with the weights of a model folder."""
    options = {"dtype": config.model.dtype, **config.sampler.options}
    built: Sampler = build("samplers", config.sampler.name, {"model_path": model_path, **options})
    return built


def trackers(config: RunConfig) -> tuple[Tracker, ...]:
    """The trackers beside ``metrics.jsonl``."""
    return tuple(build("trackers", plugin.name, plugin.options) for plugin in config.trackers)


def renderer(config: RunConfig, cast: Cast, tokenizer: Any) -> Renderer:  # noqa: ANN401  transformers' tokenizers are untyped
    """The renderer of a tokenizer, with the schemas of the tools if the chat template is to show them."""
    native = config.rollout.tool_format == "native"
    return Renderer(
        tokenizer,
        tools=cast.toolbox.schemas if native else (),
        template_options=config.rollout.template_options,
    )


def engine(config: RunConfig, cast: Cast, *, renderer: Renderer, sampler: Sampler, temperature: float) -> Engine:
    """The trajectory engine."""
    return Engine(
        sampler=sampler,
        renderer=renderer,
        condenser=cast.condenser,
        condenser_name=config.condenser.name,
        condense_when=config.rollout.condense,
        toolbox=cast.toolbox,
        limits=_limits(config),
        temperature=temperature,
    )


def check_budget(config: RunConfig, cast: Cast, renderer: Renderer, problem: Problem) -> None:
    """Check that the system message and question of a problem fit the context budget: no condenser may touch them.

    Raises:
        ContextOverflow: they do not; the message says which key to raise.
    """
    head = asyncio.run(_head(cast.task.environment(problem)))
    check_head(renderer, head, _limits(config))


async def _head(environment: Environment) -> tuple[Message, ...]:
    return await environment.start()


def _limits(config: RunConfig) -> Limits:
    rollout = config.rollout
    return Limits(
        max_turns=rollout.max_turns,
        max_context_tokens=rollout.max_context_tokens,
        max_output_tokens=rollout.max_output_tokens,
        turn_seconds=rollout.turn_seconds,
    )


def _task(config: RunConfig) -> Task:
    data = {
        key: value
        for key, value in (("data", config.task.data), ("eval_data", config.task.eval_data))
        if value is not None
    }
    built: Task = build("tasks", config.task.name, {**data, **config.task.options})
    return built


def _reward(plugin: Plugin) -> Reward:
    """A reward. Where its options hold ``parts``, each of them is a reward by name with a weight beside it."""
    options = dict(plugin.options)
    if isinstance(options.get("parts"), list):
        options["parts"] = [
            _part(parse(WeightedPlugin, part, source="reward.options.parts")) for part in options["parts"]
        ]
    built: Reward = build("rewards", plugin.name, options)
    return built


def _part(plugin: WeightedPlugin) -> Part:
    name = plugin.name.rpartition(":")[2]
    return Part(name=name, weight=plugin.weight, reward=build("rewards", plugin.name, plugin.options))


def _tools(config: RunConfig) -> dict[str, Tool]:
    tools = {name.rpartition(":")[2]: load("tools", name) for name in config.rollout.tools}
    if len(tools) != len(config.rollout.tools):
        raise ConfigError(f"checking rollout.tools: two tools have one name in {config.rollout.tools}.")
    return tools


def _chosen(
    key: str, table: Mapping[str, Callable[..., Any]], name: str, options: Mapping[str, Any]
) -> Callable[..., Any]:
    if name not in table:
        near = difflib.get_close_matches(name, table, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"checking {key}: {name!r} is unknown.{hint} Known: {', '.join(table)}.")
    parameters = inspect.signature(table[name]).parameters.values()
    known = [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise ConfigError(f"checking {key}_options: {name} has no option {option!r}. It has: {', '.join(known)}.")
    return table[name]
