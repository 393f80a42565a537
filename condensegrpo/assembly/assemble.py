"""Builds what a configuration names. The only file that loads plug-ins.

``check`` does everything that needs no model, so that a wrong configuration stops the run before one is loaded.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from condensegrpo.assembly import plugins, rollout_parts
from condensegrpo.assembly.components import Components, Problems, message_of
from condensegrpo.assembly.learning_signal import advantage_estimator, objective
from condensegrpo.assembly.plugins import build
from condensegrpo.assembly.scorers import check_models, check_scorers, names_of, open_scorers
from condensegrpo.config.checks import check_figures
from condensegrpo.config.load import evaluations, longest_request
from condensegrpo.config.schema import Plugin, RunConfig, StagePlugin, WeightedPlugin
from condensegrpo.config.yaml_tree import parse
from condensegrpo.core.errors import CondenseError, ConfigError, ContextOverflow
from condensegrpo.core.messages import Message
from condensegrpo.core.plugins import load
from condensegrpo.core.protocols import (
    Budget,
    ChecksRoom,
    Condenser,
    GroupReward,
    Problem,
    Reward,
    RewardPart,
    Sampler,
    Stage,
    Task,
    Tool,
    Tracker,
    TurnReward,
)
from condensegrpo.learner.policy import end_ids, load_tokenizer, positions
from condensegrpo.learner.targets import check_targets_of
from condensegrpo.rollout.boundary import checked_messages
from condensegrpo.rollout.codeformat import TOOL as CODE_TOOL
from condensegrpo.rollout.engine import Engine
from condensegrpo.rollout.prompt import check_pinned
from condensegrpo.rollout.render import Renderer
from condensegrpo.rollout.toolcalls import TOOL_FORMATS, Toolbox
from condensegrpo.sandbox.sandbox import Sandbox

P = TypeVar("P")


def check(config: RunConfig, base: Components | None = None) -> Components:
    """Check what can be checked without a model, the evaluations included, and build every plug-in.

    Args:
        base: see ``components``.

    Raises:
        ConfigError: a plug-in, an option, an estimator or a loss is unknown, or settings do not fit together.
        DataError: the data of a task is not what it should be.
    """
    built = components(config, base)
    for split in ("train", "eval"):
        built.problems(split)
    named = {name: components(varied, built) for name, varied in evaluations(config).items()}
    for each in named.values():
        each.problems("eval")
    plugins.check("samplers", config.sampler.name, config.sampler.options, _for_sampler(config, ""))
    chosen = load("samplers", config.sampler.name)
    check_scorers(names_of(built.condenser), chosen, config.sampler.name)
    rollout_parts.check_probe(config, chosen)
    for tracker in config.trackers:
        plugins.check("trackers", tracker.name, tracker.options)
    return replace(built, evaluations=named)


def components(config: RunConfig, base: Components | None = None) -> Components:
    """Build every plug-in of a configuration but the sampler and the trackers; raises as ``check`` does.

    Args:
        base: of another configuration; a part of it whose settings are the same is shared. The condenser is not, since
            its counts are those of the rollouts that it serves.
    """
    check_figures(config)

    def part(make: Callable[[], P], name: str, settings: Callable[[RunConfig], object]) -> P:
        if base is None or settings(base.config) != settings(config):
            return make()
        shared: P = getattr(base, name)
        return shared

    sandbox = part(lambda: _sandbox(config), "sandbox", lambda of: of.sandbox)
    task = part(
        lambda: _with_methods(_task(config), config.task.name, "problems", "environment"),
        "task",
        lambda of: (of.task, tuple(_shared(of))),
    )
    return Components(
        config=config,
        task=task,
        data=base.data if base is not None and base.task is task else Problems(task),
        reward=part(lambda: _reward(config.reward, sandbox), "reward", lambda of: (of.reward, of.sandbox)),
        condenser=condenser(config.condenser),
        toolbox=part(lambda: _toolbox(config, sandbox), "toolbox", lambda of: (of.rollout.tools, of.sandbox)),
        sandbox=sandbox,
        estimator=part(
            lambda: advantage_estimator(config),
            "estimator",
            lambda of: (of.algorithm.advantage, of.rollout.limits.max_context_tokens),
        ),
        objective=part(lambda: objective(config.algorithm), "objective", lambda of: of.algorithm),
    )


def _toolbox(config: RunConfig, sandbox: Sandbox) -> Toolbox:
    tools = config.rollout.tools
    return Toolbox(
        _tools(config, sandbox),
        format=TOOL_FORMATS[tools.format],
        seconds=tools.seconds,
        max_chars=tools.max_chars,
        max_turns=tools.max_turns,
    )


def use_threads(config: RunConfig) -> None:
    """Give torch as many CPU threads as the configuration says."""
    if config.learner.threads is not None:
        torch.set_num_threads(config.learner.threads)


def sampler(config: RunConfig, model_path: str) -> Sampler:
    """The sampler, with the weights of a model folder."""
    built: Sampler = build("samplers", config.sampler.name, config.sampler.options, _for_sampler(config, model_path))
    return built


def _for_sampler(config: RunConfig, model_path: str) -> dict[str, object]:
    return {"model_path": model_path, "dtype": config.model.dtype, "max_model_len": longest_request(config)}


def trackers(config: RunConfig) -> tuple[Tracker, ...]:
    """The trackers beside ``metrics.jsonl``."""
    return tuple(build("trackers", plugin.name, plugin.options) for plugin in config.trackers)


def renderer(config: RunConfig, components: Components, source: str) -> Renderer:
    """The renderer for a model folder or Hub id, with the schemas of the tools if the chat template is to show them."""
    native = config.rollout.tools.format == "native"
    return Renderer(
        load_tokenizer(source),
        tools=components.toolbox.schemas if native else (),
        template_options=config.rollout.template_options,
        stop_ids=end_ids(source),
    )


def engine(
    config: RunConfig, components: Components, *, renderer: Renderer, sampler: Sampler, temperature: float
) -> Engine:
    """The trajectory engine."""
    return Engine(
        sampler=sampler,
        renderer=renderer,
        condenser=components.condenser,
        condenser_name=config.condenser.name,
        scorers=open_scorers(
            names_of(components.condenser), sampler=sampler, renderer=renderer, dtype=config.model.dtype
        ),
        trigger=config.rollout.condense,
        toolbox=components.toolbox,
        limits=config.rollout.limits,
        temperature=temperature,
        probe=rollout_parts.probe(config, renderer, sampler),
        confidence=config.rollout.stop_when_confident,
    )


def check_model(config: RunConfig, components: Components, source: str) -> None:
    """Check what a configuration asks of its model's tokenizer, chat template and positions. Loads no weights.

    Raises:
        ConfigError: system message and question, or a context with its reply, are too long (the message says which key
            to change), the chat template knows no tool results, or the model has no layers for the adapters.
    """
    rendering = renderer(config, components, source)
    pinned = components.toolbox.introduced(_pinned(components.task, components.problems("train")[0]))
    check_models(names_of(components.condenser), source, pinned=pinned, tokens=config.rollout.limits.max_context_tokens)
    try:
        check_pinned(rendering, pinned, config.rollout.limits)
    except ContextOverflow as error:
        raise ConfigError(str(error)) from error
    _check_condenser(config, components, rendering, pinned)
    rollout_parts.check_confidence(config, rendering)
    if components.toolbox.names:
        rendering.check_roles(pinned, components.toolbox.format.result("call_0", components.toolbox.names[0], "0"))
    longest, room = (
        config.rollout.limits.max_context_tokens + config.rollout.limits.max_output_tokens,
        positions(source),
    )
    if room is not None and longest > room:
        raise ConfigError(
            f"checking rollout.limits.max_context_tokens: with rollout.limits.max_output_tokens it makes {longest} "
            f"tokens, and the model has {room} positions. Lower one of them."
        )
    if config.model.lora is not None:
        check_targets_of(source, config.model.lora.targets)


def _pinned(task: Task, problem: Problem) -> tuple[Message, ...]:
    """How an episode of the problem begins.

    Raises:
        ConfigError: the task fails at it, or gives something else.
    """

    async def begin() -> tuple[Message, ...]:
        return checked_messages(await task.environment(problem).start(), f"{type(task).__name__}.environment.start")

    try:
        return asyncio.run(begin())
    except CondenseError:
        raise
    except Exception as error:  # the boundary to a task
        raise ConfigError(
            f"starting the problem {problem.id} of the task {type(task).__name__}: {message_of(error)}. It would "
            f"fail in every trajectory: fix the task or its data."
        ) from error


def _check_condenser(config: RunConfig, components: Components, renderer: Renderer, pinned: Sequence[Message]) -> None:
    """Check that the condenser has the room that it needs; at the draw of the trigger that leaves it the least."""
    if not isinstance(components.condenser, ChecksRoom):
        return
    most = config.rollout.limits.max_context_tokens
    room = Budget(
        tokens=config.rollout.condense.room(most, draw=1.0),
        count=renderer.count,
        request_tokens=most,
        reply_tokens=config.rollout.limits.max_output_tokens,
    )
    try:
        components.condenser.check_room(pinned, room)
    except ValueError as error:
        raise ConfigError(f"checking the room of the condenser {config.condenser.name}: {error}.") from error


def _sandbox(config: RunConfig) -> Sandbox:
    section = config.sandbox
    return Sandbox(
        isolation=section.isolation, limits=section.limits, parallel=section.parallel, packages=section.packages
    )


def _task(config: RunConfig) -> Task:
    given = {"data": config.task.data, "eval_data": config.task.eval_data}
    options = {**{option: place for option, place in given.items() if place is not None}, **config.task.options}
    supplied = dict[str, object]()
    for option, source, value in _shared(config):
        if option in options:
            raise ConfigError(
                f"checking task.options.{option}: found {options[option]!r}; the task gets it from {source}, which is "
                f"{value!r}. Remove task.options.{option} and set {source}."
            )
        supplied[option] = value
    built: Task = build("tasks", config.task.name, options, supplied)
    return built


def _shared(config: RunConfig) -> Iterator[tuple[str, str, object]]:
    """Options of a task that are settings of the rollout: the option, the key of the setting and its value."""
    yield "tool_format", "rollout.tools.format", config.rollout.tools.format
    if "keep_last" in config.condenser.options:
        yield "keep_last", "condenser.options.keep_last", config.condenser.options["keep_last"]


def condenser(plugin: Plugin) -> Condenser:
    """A condenser. Where its options hold ``stages``, each of them is a condenser by name with a trigger beside it."""
    options = dict(plugin.options)
    if "stages" in options:
        if not isinstance(options["stages"], list):
            raise ConfigError(
                f"checking the option stages of the condenser {plugin.name}: found {options['stages']!r}, wanted a "
                f"list of condensers."
            )
        options["stages"] = tuple(
            _stage(parse(StagePlugin, stage, source=f"stages[{place}] of the condenser {plugin.name}"))
            for place, stage in enumerate(options["stages"])
        )
    built: Condenser = _with_methods(build("condensers", plugin.name, options), plugin.name, "condense")
    return built


def _stage(plugin: StagePlugin) -> Stage:
    return Stage(name=plugin.name.rpartition(":")[2], condenser=condenser(plugin), over=plugin.over)


def _reward(plugin: Plugin, sandbox: Sandbox) -> Reward | GroupReward:
    """A reward. Where its options hold ``parts``, each of them is a reward by name with a weight beside it."""
    options = dict(plugin.options)
    if "parts" in options:
        if not isinstance(options["parts"], list):
            raise ConfigError(f"checking reward.options.parts: found {options['parts']!r}, wanted a list of rewards.")
        options["parts"] = [
            _part(parse(WeightedPlugin, part, source=f"reward.options.parts[{place}]"), sandbox)
            for place, part in enumerate(options["parts"])
        ]
    built = _of_one_kind(build("rewards", plugin.name, options, {"sandbox": sandbox}), plugin.name)
    if isinstance(built, TurnReward):
        raise ConfigError(
            f"setting up the reward {plugin.name}: it pays single turns and says nothing of the outcome. Make it a "
            f"part of a weighted_sum beside one that does, such as correct: "
            f"reward={{name: weighted_sum, options: {{parts: [{{name: correct}}, {{name: {plugin.name!r}}}]}}}}."
        )
    return built


def _part(plugin: WeightedPlugin, sandbox: Sandbox) -> RewardPart:
    if "parts" in plugin.options:
        raise ConfigError(
            f"setting up the part {plugin.name} of reward.options.parts: it has parts of its own, and a part is a "
            f"single reward. List them beside the others, each with the product of the two weights."
        )
    built = _of_one_kind(build("rewards", plugin.name, plugin.options, {"sandbox": sandbox}), plugin.name)
    if isinstance(built, GroupReward):
        raise ConfigError(
            f"setting up the part {plugin.name} of reward.options.parts: it scores a group as a whole, and a weighted "
            f"sum scores one trajectory at a time. Use it alone: reward.name={plugin.name}."
        )
    return RewardPart(name=plugin.name.rpartition(":")[2], weight=plugin.weight, reward=built)


def _of_one_kind(reward: Any, name: str) -> Reward | GroupReward | TurnReward:  # noqa: ANN401  see plugins.load
    """The reward, if it is one for outcomes, one for groups or one for turns: with two of them, which is meant?"""
    kinds = {
        "__call__": callable(reward),
        "score_group": isinstance(reward, GroupReward),
        "turn_rewards": isinstance(reward, TurnReward),
    }
    found = [method for method, there in kinds.items() if there]
    if len(found) != 1:
        raise ConfigError(
            f"setting up {name}: of {', '.join(kinds)} {type(reward).__name__} has {' and '.join(found) or 'none'}, "
            f"wanted exactly one; see Reward, GroupReward and TurnReward in protocols.py."
        )
    built: Reward | GroupReward | TurnReward = reward
    return built


def _with_methods(plugin: P, name: str, *methods: str) -> P:
    """The plug-in, if it has what its protocol asks for: a plug-in inherits nothing, so nothing else would notice."""
    missing = [method for method in methods if not callable(getattr(plugin, method, None))]
    if missing:
        raise ConfigError(
            f"setting up {name}: {type(plugin).__name__} has no {' and no '.join(missing)}; see protocols.py."
        )
    return plugin


def _tools(config: RunConfig, sandbox: Sandbox) -> dict[str, Tool]:
    """The tools by the names that the model calls them by."""
    named = [tool if isinstance(tool, Plugin) else Plugin(name=tool) for tool in config.rollout.tools.use]
    tools = {plugin.name.rpartition(":")[2]: _tool(plugin, sandbox) for plugin in named}
    if len(tools) != len(named):
        raise ConfigError(
            f"checking rollout.tools.use: two tools have one name in {[plugin.name for plugin in named]}."
        )
    if config.rollout.tools.format == "code" and set(tools) != {CODE_TOOL}:
        raise ConfigError(
            f"checking rollout.tools.use: found {', '.join(tools) or 'none'}, and rollout.tools.format=code runs the "
            f"tool {CODE_TOOL} and no other. Set rollout.tools.use=[{CODE_TOOL}], or another format."
        )
    return tools


def _tool(plugin: Plugin, sandbox: Sandbox) -> Tool:
    """A function is the tool; a class is built with its options, and its ``__call__`` is the tool."""
    loaded = load("tools", plugin.name)
    if inspect.isclass(loaded):
        built = build("tools", plugin.name, plugin.options, {"sandbox": sandbox})
        tool: Tool = _with_methods(built, plugin.name, "__call__").__call__
        return tool
    if plugin.options:
        raise ConfigError(
            f"setting up the tool {plugin.name} with {plugin.options}: it is a function and has no options. A tool "
            f"with options is a class whose __call__ is the tool."
        )
    function: Tool = loaded
    return function
