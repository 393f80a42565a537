"""Builds what a configuration names. The only file that loads plug-ins.

``check`` does everything that needs no model, so that a wrong configuration stops the run before one is loaded.
"""

import asyncio
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from condensegrpo import plugins
from condensegrpo.advantages import ESTIMATORS
from condensegrpo.config import HELD_OUT, Plugin, RunConfig, WeightedPlugin, evaluations, parse
from condensegrpo.consistency import check_figures
from condensegrpo.credit import Scores, advantages_of
from condensegrpo.errors import ConfigError, ContextOverflow
from condensegrpo.learner.policy import end_ids, load_tokenizer, positions
from condensegrpo.losses import LOSSES, TokenLoss
from condensegrpo.messages import Message
from condensegrpo.plugins import build, load
from condensegrpo.protocols import Condenser, Part, Problem, Reward, Sampler, Split, Task, Tool, Tracker
from condensegrpo.rollout.budget import Limits, check_head
from condensegrpo.rollout.episode import Engine
from condensegrpo.rollout.render import Renderer
from condensegrpo.rollout.toolcalls import TOOL_FORMATS, Toolbox

P = TypeVar("P")

# two trajectories of one turn and one token each: what the options of estimators and losses are tried out on
TOY_SCORES = Scores(
    *torch.tensor([[1.0, 0.0], [1.0, 0.0], [8.0, 8.0], [0.0, 0.0]]), *torch.tensor([[0, 0], [1, 1], [-1, -1]])
)
TOY_TOKENS = (torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0]), torch.tensor([1.0, -1.0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """What a run is made of, besides the model."""

    task: Task
    reward: Reward
    condenser: Condenser
    toolbox: Toolbox
    estimator: Callable[[Scores], torch.Tensor]  # the advantage of every turn, (N, K)
    loss: Callable[..., TokenLoss]


def check(config: RunConfig) -> Cast:
    """Check what can be checked without a model, the evaluations included, and build every plug-in.

    Raises:
        ConfigError: a plug-in, an option, an estimator or a loss is unknown, or figures do not fit together.
        DataError: the data of a task is not what it should be.
    """
    built = cast(config)
    for split in ("train", "eval"):
        problems(built.task, split)
    for name, varied in evaluations(config).items():
        if name != HELD_OUT:
            problems(cast(varied).task, "eval")
    plugins.check("samplers", config.sampler.name, _sampler_options(config, ""))
    for tracker in config.trackers:
        plugins.check("trackers", tracker.name, tracker.options)
    return built


def cast(config: RunConfig) -> Cast:
    """Build every plug-in of a configuration but the sampler and the trackers; raises as ``check`` does."""
    check_figures(config)
    algorithm = config.algorithm
    estimator = _chosen("algorithm.estimator", ESTIMATORS, algorithm.estimator, algorithm.estimator_options)
    loss = _chosen("algorithm.loss", LOSSES, algorithm.loss, algorithm.loss_options)
    options = _estimator_options(config)
    _try_out("algorithm.estimator_options", partial(advantages_of, TOY_SCORES, estimator, options))
    _try_out("algorithm.loss_options", partial(loss, *TOY_TOKENS, **algorithm.loss_options))
    return Cast(
        task=_with_methods(_task(config), config.task.name, "problems", "environment"),
        reward=_with_methods(_reward(config.reward), config.reward.name, "__call__"),
        condenser=_with_methods(
            build("condensers", config.condenser.name, config.condenser.options), config.condenser.name, "condense"
        ),
        toolbox=Toolbox(
            _tools(config),
            format=TOOL_FORMATS[config.rollout.tool_format],
            seconds=config.rollout.tool_seconds,
        ),
        estimator=partial(advantages_of, estimator=estimator, options=options),
        loss=partial(loss, **algorithm.loss_options),
    )


def problems(task: Task, split: Split) -> Sequence[Problem]:
    """The problems of a split.

    Raises:
        ConfigError: there are none, or the task cannot make as many as it was asked for.
    """
    try:
        found = task.problems(split)
    except ValueError as error:
        raise ConfigError(f"making the {split} problems of the task: {error}") from error
    if not len(found):
        raise ConfigError(f"reading the {split} problems of the task: found none. Check task.data and task.eval_data.")
    return found


def use_threads(config: RunConfig) -> None:
    """Give torch as many CPU threads as the configuration says."""
    if config.learner.threads is not None:
        torch.set_num_threads(config.learner.threads)


def sampler(config: RunConfig, model_path: str) -> Sampler:
    """The sampler, with the weights of a model folder."""
    built: Sampler = build("samplers", config.sampler.name, _sampler_options(config, model_path))
    return built


def _sampler_options(config: RunConfig, model_path: str) -> dict[str, Any]:
    return {"model_path": model_path, "dtype": config.model.dtype, **config.sampler.options}


def trackers(config: RunConfig) -> tuple[Tracker, ...]:
    """The trackers beside ``metrics.jsonl``."""
    return tuple(build("trackers", plugin.name, plugin.options) for plugin in config.trackers)


def renderer(config: RunConfig, cast: Cast, source: str) -> Renderer:
    """The renderer for a model folder or Hub id, with the schemas of the tools if the chat template is to show them."""
    native = config.rollout.tool_format == "native"
    return Renderer(
        load_tokenizer(source),
        tools=cast.toolbox.schemas if native else (),
        template_options=config.rollout.template_options,
        stop_ids=end_ids(source),
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


def check_model(config: RunConfig, cast: Cast, source: str) -> None:
    """Check what a configuration asks of its model's tokenizer, chat template and positions. Loads no weights.

    Raises:
        ConfigError: system message and question, or a context with its reply, are too long (the message says which key
            to change), or the chat template knows no tool results.
    """
    rendering = renderer(config, cast, source)
    head = cast.toolbox.introduced(asyncio.run(_head(cast.task, problems(cast.task, "train")[0])))
    try:
        check_head(rendering, head, _limits(config))
    except ContextOverflow as error:
        raise ConfigError(str(error)) from error
    if config.rollout.tools:
        rendering.check_roles(head, cast.toolbox.format.result("call_0", config.rollout.tools[0], "0"))
    longest, room = config.rollout.max_context_tokens + config.rollout.max_output_tokens, positions(source)
    if room is not None and longest > room:
        raise ConfigError(
            f"checking rollout.max_context_tokens: with rollout.max_output_tokens it makes {longest} tokens, and the "
            f"model has {room} positions. Lower one of them."
        )


async def _head(task: Task, problem: Problem) -> tuple[Message, ...]:
    return await task.environment(problem).start()


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
    if "parts" in options:
        if not isinstance(options["parts"], list):
            raise ConfigError(f"checking reward.options.parts: found {options['parts']!r}, wanted a list of rewards.")
        options["parts"] = [
            _part(parse(WeightedPlugin, part, source="reward.options.parts")) for part in options["parts"]
        ]
    built: Reward = build("rewards", plugin.name, options)
    return built


def _part(plugin: WeightedPlugin) -> Part:
    name = plugin.name.rpartition(":")[2]
    return Part(name=name, weight=plugin.weight, reward=build("rewards", plugin.name, plugin.options))


def _with_methods(plugin: P, name: str, *methods: str) -> P:
    """The plug-in, if it has what its protocol asks for: a plug-in inherits nothing, so nothing else would notice."""
    missing = [method for method in methods if not callable(getattr(plugin, method, None))]
    if missing:
        raise ConfigError(
            f"setting up {name}: {type(plugin).__name__} has no {' and no '.join(missing)}; see protocols.py."
        )
    return plugin


def _estimator_options(config: RunConfig) -> dict[str, Any]:
    """The options of the estimator; ``efficient`` takes its anchors from the context budget unless they are given."""
    given = config.algorithm.estimator_options
    if config.algorithm.estimator != "efficient":
        return given
    budget = config.rollout.max_context_tokens
    return {"context_low": budget / 16, "context_high": float(budget), **given}


def _try_out(key: str, call: Callable[[], object]) -> None:
    """Call a function of the maths once on toy values, so that options it refuses are found early."""
    try:
        call()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"checking {key}: {error}.") from error


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
