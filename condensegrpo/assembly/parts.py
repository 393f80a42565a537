"""Builds each plug-in that a configuration names: task, reward, condenser, tools, and the sandbox that they share."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

from condensegrpo.assembly.objects import NO_OBJECTS, Objects, object_of
from condensegrpo.assembly.plugins import build_plugin
from condensegrpo.config.schema import Plugin, RunConfig, StagePlugin, WeightedPlugin
from condensegrpo.config.yaml_tree import parse
from condensegrpo.core.condenser import Condenser, Stage, TextWriter
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.failures import at_definition, plugin_code
from condensegrpo.core.plugins import load_plugin, missing_methods
from condensegrpo.core.protocols.reward import GroupReward, Reward, RewardPart, TurnReward
from condensegrpo.core.protocols.task import Task
from condensegrpo.core.protocols.tool import EnvironmentTool, Tool
from condensegrpo.episodes.boundary import checked_tools
from condensegrpo.episodes.toolcalls import Toolbox
from condensegrpo.episodes.toolformats import CallsOneTool, ToolFormat, check_format
from condensegrpo.sandbox.sandbox import Sandbox

P = TypeVar("P")


def build_task(config: RunConfig, objects: Objects = NO_OBJECTS) -> Task:
    """The task, with the options that it shares with the rollout."""
    given = object_of(objects, config.task)
    built = cast(Task, _loaded_task(config) if given is None else given)
    return _with_methods(built, config.task.name, "problems", "environment")


def _loaded_task(config: RunConfig) -> object:
    given = {"data": config.task.data, "eval_data": config.task.eval_data}
    options = {**{option: value for option, value in given.items() if value is not None}, **config.task.options}
    _check_data(config.task.name, options)
    supplied = dict[str, object]()
    for option, source, value in shared_options(config):
        if option in options:
            raise ConfigError(
                f"checking task.options.{option}: found {options[option]!r}; the task gets it from {source}, which is "
                f"{value!r}. Remove task.options.{option} and set {source}."
            )
        supplied[option] = value
    return build_plugin("tasks", config.task.name, options, supplied)


def _check_data(name: str, options: Mapping[str, object]) -> None:
    """Check that a task that reads files is given them: its options of these names are keys of ``task``."""
    parameters = inspect.signature(load_plugin("tasks", name)).parameters
    for key in ("data", "eval_data"):
        if key not in options and key in parameters and parameters[key].default is inspect.Parameter.empty:
            raise ConfigError(
                f"checking task.{key}: it is not set, and the task {name} reads its problems from there. Set it to a "
                f"JSONL or Parquet file, a folder of them or a Hub id, such as task.{key}={key}.jsonl."
            )


def shared_options(config: RunConfig) -> Iterator[tuple[str, str, object]]:
    """Options of a task that are settings of the rollout: the option, the key of the setting and its value."""
    yield "tool_format", "rollout.tools.format", _named(config.rollout.tools.format).name
    if "keep_last" in config.condenser.options:
        yield "keep_last", "condenser.options.keep_last", config.condenser.options["keep_last"]


def build_sandbox(config: RunConfig) -> Sandbox:
    """The sandbox of the tools and the reward; its process starts with the first call."""
    section = config.sandbox
    for folder in section.packages:
        if not Path(folder).is_dir():
            raise ConfigError(
                f"checking sandbox.packages: there is no folder {folder}. Install the packages there (pip install "
                f"--target {folder} …), or remove it from the list."
            )
    return Sandbox(
        isolation=section.isolation, limits=section.limits, parallel=section.parallel, packages=section.packages
    )


def build_reward(plugin: Plugin, sandbox: Sandbox, objects: Objects = NO_OBJECTS) -> Reward | GroupReward:
    """A reward. Where its options hold ``parts``, each of them is a reward by name with a weight beside it."""
    options = dict(plugin.options)
    if "parts" in options:
        if not isinstance(options["parts"], list):
            raise ConfigError(f"checking reward.options.parts: found {options['parts']!r}, wanted a list of rewards.")
        options["parts"] = [
            _part(parse(WeightedPlugin, _section(part), source=f"reward.options.parts[{index}]"), sandbox, objects)
            for index, part in enumerate(options["parts"])
        ]
    built = _reward(plugin, options, sandbox, objects)
    if isinstance(built, TurnReward):
        raise ConfigError(
            f"setting up the reward {plugin.name}: it pays single turns and says nothing of the outcome. Make it a "
            f"part of a weighted_sum beside one that does, such as correct: "
            f"reward={{name: weighted_sum, options: {{parts: [{{name: correct}}, {{name: {plugin.name!r}}}]}}}}."
        )
    return built


def _part(plugin: WeightedPlugin, sandbox: Sandbox, objects: Objects) -> RewardPart:
    if "parts" in plugin.options:
        raise ConfigError(
            f"setting up the part {plugin.name} of reward.options.parts: it has parts of its own, and a part is a "
            f"single reward. List them beside the others, each with the product of the two weights."
        )
    built = _reward(plugin, plugin.options, sandbox, objects)
    if isinstance(built, GroupReward):
        raise ConfigError(
            f"setting up the part {plugin.name} of reward.options.parts: it scores a group as a whole, and a weighted "
            f"sum scores one trajectory at a time. Use it alone: reward.name={plugin.name}."
        )
    return RewardPart(name=plugin.name.rpartition(":")[2], weight=plugin.weight, reward=built)


def _section(given: object) -> object:
    """The section of an entry of a list, which may be a name alone."""
    return {"name": given} if isinstance(given, str) else given


def _reward(
    plugin: Plugin, options: Mapping[str, object], sandbox: Sandbox, objects: Objects
) -> Reward | GroupReward | TurnReward:
    """A reward for outcomes, for groups or for turns: with two of them, which is meant?"""
    name, given = plugin.name, object_of(objects, plugin)
    reward = build_plugin("rewards", name, options, {"sandbox": sandbox}) if given is None else given
    kinds = ("__call__", "score_group", "turn_rewards")
    present = [method for method in kinds if hasattr(reward, method)]
    if len(present) != 1:
        raise ConfigError(
            f"setting up the reward {name}: {type(reward).__name__} has "
            f"{' and '.join(present) or 'no method of a reward'}, wanted exactly one of "
            f"{', '.join(kinds)}{at_definition(reward)}; see docs/how-to/write-a-reward.md."
        )
    return cast(Reward, _with_methods(reward, name, present[0]))


def build_condenser(plugin: Plugin, objects: Objects = NO_OBJECTS) -> Condenser:
    """A condenser. Where its options hold ``stages``, each of them is a condenser by name with a trigger beside it."""
    options = dict(plugin.options)
    if "stages" in options:
        if not isinstance(options["stages"], list):
            raise ConfigError(
                f"checking the option stages of the condenser {plugin.name}: found {options['stages']!r}, wanted a "
                f"list of condensers."
            )
        options["stages"] = tuple(
            Stage(name=stage.name.rpartition(":")[2], condenser=build_condenser(stage, objects), over=stage.over)
            for index, raw in enumerate(options["stages"])
            for stage in [parse(StagePlugin, _section(raw), source=f"stages[{index}] of the condenser {plugin.name}")]
        )
    built = object_of(objects, plugin)
    if built is None:
        built = build_plugin("condensers", plugin.name, options, {"open_writer": _open_writer})
    if not isinstance(built, Condenser):
        kind = type(built).__name__
        raise ConfigError(
            f"setting up the condenser {plugin.name}: {kind} is no Condenser{at_definition(built)}; wanted "
            f"class {kind}(Condenser), of condensegrpo.core.condenser."
        )
    return built


def _open_writer(*arguments: Any, **options: Any) -> TextWriter:  # noqa: ANN401  those of open_writer
    from condensegrpo.samplers.writers import open_writer  # imports aiohttp

    return open_writer(*arguments, **options)


def build_toolbox(config: RunConfig, sandbox: Sandbox, condenser: Condenser, objects: Objects = NO_OBJECTS) -> Toolbox:
    """The tools, those of the condenser among them, and how the policy calls them."""
    plugin = _named(config.rollout.tools.format)
    built = build_plugin("tool_formats", plugin.name, plugin.options)
    form: ToolFormat = _with_methods(built, plugin.name, "parse", "result", "instructions")
    with plugin_code(f"trying the tool format {plugin.name}{at_definition(form)}", ConfigError):
        check_format(form)
    toolbox = Toolbox(_tools(config, form, sandbox, objects), format=form, limits=config.rollout.tools)
    offered = checked_tools(condenser.tools())
    if not offered:
        return toolbox
    _check_offered(config, form, offered)
    try:
        return toolbox.with_condenser_tools(offered)
    except ValueError as error:
        used = ", ".join(toolbox.names) or "none"
        raise ConfigError(
            f"setting up the condenser {config.condenser.name}: {error}. The tools of the run are: {used} "
            f"(rollout.tools.use)."
        ) from error


def _check_offered(config: RunConfig, form: ToolFormat, offered: Sequence[EnvironmentTool]) -> None:
    """Check that the policy can call the tools of the condenser, and that they take effect at once."""
    names = ", ".join(tool.name for tool in offered)
    if isinstance(form, CallsOneTool):
        raise ConfigError(
            f"checking condenser.name: {config.condenser.name} offers {names}, and rollout.tools.format="
            f"{_named(config.rollout.tools.format).name} runs the tool {form.only_tool} and no other. Set "
            f"rollout.tools.format=tagged, or native."
        )
    if config.rollout.condense.when != "every_turn":
        raise ConfigError(
            f"checking rollout.condense.when: found {config.rollout.condense.when}, and the policy decides by {names} "
            f"when {config.condenser.name} condenses. Set rollout.condense.when=every_turn."
        )
    numbered = [tool.name for tool in offered if {"turn", "turns"} & set(tool.parameters.get("properties", ()))]
    if numbered and config.rollout.condense.meter == "none":
        raise ConfigError(
            f"checking rollout.condense.meter: found none, and the policy names turns by their numbers when it calls "
            f"{', '.join(numbered)}. Set rollout.condense.meter=turns, or tokens: observations then end with them."
        )


def _named(plugin: str | Plugin) -> Plugin:
    return plugin if isinstance(plugin, Plugin) else Plugin(name=plugin)


def _tools(config: RunConfig, form: ToolFormat, sandbox: Sandbox, objects: Objects) -> dict[str, Tool]:
    """The tools by the names that the model calls them by."""
    named = list(map(_named, config.rollout.tools.use))
    tools = {plugin.name.rpartition(":")[2]: _tool(plugin, sandbox, objects) for plugin in named}
    if len(tools) != len(named):
        raise ConfigError(
            f"checking rollout.tools.use: two tools have one name in {[plugin.name for plugin in named]}."
        )
    if isinstance(form, CallsOneTool) and set(tools) != {form.only_tool}:
        raise ConfigError(
            f"checking rollout.tools.use: found {', '.join(tools) or 'none'}, and rollout.tools.format="
            f"{_named(config.rollout.tools.format).name} runs the tool {form.only_tool} and no other. Set "
            f"rollout.tools.use=[{form.only_tool}], or another format."
        )
    return tools


def _tool(plugin: Plugin, sandbox: Sandbox, objects: Objects) -> Tool:
    """A function is the tool; a class is built with its options, and its ``__call__`` is the tool."""
    given = object_of(objects, plugin)
    loaded: Any = load_plugin("tools", plugin.name) if given is None else given
    isclass = inspect.isclass(loaded)
    if plugin.options and not isclass:
        raise ConfigError(
            f"setting up the tool {plugin.name} with {plugin.options}: it is no class and has no options. A tool with "
            f"options is a class whose __call__ is the tool."
        )
    if not inspect.isroutine(loaded):
        built = build_plugin("tools", plugin.name, plugin.options, {"sandbox": sandbox}) if isclass else loaded
        if not callable(built):
            raise ConfigError(_faulty(plugin.name, built, "has no __call__"))
        tool: Tool = built.__call__
        return tool
    return cast(Tool, loaded)


def check_tracker(name: str) -> None:
    """Check that a tracker that is a class has the method of one; it is opened when the run starts."""
    factory = load_plugin("trackers", name)
    if isinstance(factory, type):
        _with_methods(factory, name, "log")


def _faulty(name: str, plugin: object, fault: str) -> str:
    kind = plugin.__name__ if isinstance(plugin, FunctionType | type) else type(plugin).__name__
    return f"setting up {name}: {kind} {fault}; see docs/reference/protocols.md."


def _with_methods(plugin: P, name: str, *methods: str) -> P:
    """The plug-in, if it has the methods that have no default: it may inherit nothing, so nothing else would notice."""
    if missing := missing_methods(plugin, *methods):
        raise ConfigError(_faulty(name, plugin, f"has no {' and no '.join(missing)}{at_definition(plugin)}"))
    return plugin
