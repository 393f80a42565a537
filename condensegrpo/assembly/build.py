"""Builds and checks the components of a configuration, so that a wrong one stops before any model is loaded."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from condensegrpo.assembly import runtime
from condensegrpo.assembly.components import Components, read_problems
from condensegrpo.assembly.scorers import check_scorers
from condensegrpo.config.checks import check_values
from condensegrpo.config.load import evaluations, in_evaluation
from condensegrpo.config.schema import RunConfig
from condensegrpo.config.use import NO_OBJECTS, CondenserUse, Objects
from condensegrpo.core.condenser import Condenser, TextWriter
from condensegrpo.core.defaults import overrides
from condensegrpo.core.errors import ConfigError, DataError
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.episodes.boundary import checked_tools
from condensegrpo.episodes.toolcalls import Toolbox
from condensegrpo.episodes.toolformats import ToolFormat
from condensegrpo.sandbox.sandbox import Sandbox


def build(config: RunConfig, base: Components | None = None, objects: Objects = NO_OBJECTS) -> Components:
    """Build the components of a configuration and of its evaluations, and check all that needs no model.

    Args:
        base, objects: see ``build_components``.
    """
    made = _together(
        partial(build_components, config, base, objects),
        partial(runtime.check_sampler, config, objects),
        *(tracker.check for tracker in config.trackers),
    )
    built: Components = made[0]
    for split in ("train", "eval"):
        built.problems(split)
    named = dict[str, Components]()
    for name, varied in evaluations(config).items():
        with in_evaluation(name):
            named[name] = build_components(varied, built, objects)
        _check_ids(name, named[name])
    name, is_object = config.sampler.name, config.sampler.name in objects
    sampler = type(objects[name]) if is_object else config.sampler.plugin(objects)
    check_scorers(built.condenser.scorers, sampler, name)
    if built.toolbox.template_schemas and overrides(sampler, Sampler.reply):
        raise ConfigError(
            f"checking rollout.tools.format: the chat template is to show the tools, and the sampler {name} sends "
            f"messages without them. Set rollout.tools.format=tagged, which explains them in the system message."
        )
    if is_object and config.warm_start.steps:
        raise ConfigError(
            f"checking warm_start.steps: found {config.warm_start.steps}; its probe opens a sampler for the model that "
            f"it has trained, and {name} is an object. Set warm_start.steps=0 or name the sampler."
        )
    if faults := [fault for each in (built, *named.values()) for fault in _out_of_reach(each, sampler)]:
        raise ConfigError("\n".join(dict.fromkeys(faults)))
    return replace(built, evaluations=named)


def _out_of_reach(components: Components, sampler: object) -> Iterator[str]:
    """The faults of a configuration whose worker processes would need what is in this process."""
    config, scorers, processes = components.config, components.condenser.scorers, "rollout.workers.processes"
    objects = ", ".join(name for name in components.objects if name != config.sampler.name)
    faults = (
        (
            not overrides(sampler, Sampler.client),
            f"the model of the sampler {config.sampler.name} is in this process. Set {processes}=0, or "
            f"sampler.name=vllm_server",
        ),
        (
            bool(scorers),
            f"the condenser {config.condenser.name} has units scored by {', '.join(scorers)}, a model in this process. "
            f"Set {processes}=0, or name another condenser",
        ),
        (
            bool(objects),
            f"they build plug-ins by name, and {objects} is an object. Set {processes}=0, or put the class into a file "
            f"and name it path/to/file.py:Name",
        ),
    )
    if count := config.rollout.workers.processes:
        yield from (
            f"checking rollout.workers: found processes={count}, and {why}." for is_fault, why in faults if is_fault
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
        base: components of another configuration, of which this is an evaluation or a worker's; parts whose settings
            are the same are shared, and so is what only training uses. The condenser is not, since its counts belong to
            the rollouts that it serves; an object is, unless it counts.
        objects: plug-ins that were given as objects, by the names that the configuration has for them.
    """
    check_values(config)

    def part(name: str, settings: Callable[[RunConfig], object], make: Callable[[], Any]) -> Any:  # noqa: ANN401  any part
        """The part of ``base``, if it was made from the same settings, or a new one."""
        same = base is not None and settings(base.config) == settings(config)
        return getattr(base, name) if same else make()

    sandbox = part("sandbox", lambda of: of.sandbox, lambda: _sandbox(config))
    task, reward, condenser, estimator, objective = _together(
        lambda: part(
            "task",
            lambda of: (of.task, of.shared_options),
            lambda: config.task.build_with(objects, config.shared_options),
        ),
        lambda: part(
            "reward", lambda of: (of.reward, of.sandbox), lambda: config.reward.build(objects, sandbox=sandbox)
        ),
        lambda: build_condenser(config.condenser, objects),
        lambda: base.estimator if base is not None else _signal(lambda of: of.advantage_estimator(config)),
        lambda: base.objective if base is not None else _signal(lambda of: of.objective(config.algorithm)),
    )
    if base is not None and condenser is base.condenser and type(condenser).counts is not Condenser.counts:
        condenser = deepcopy(condenser)  # of one object that counts, every evaluation has a copy with its own counts
    return Components(
        config=config,
        task=task,
        problems=base.problems if base is not None and base.task is task else cache(partial(read_problems, task)),
        reward=reward,
        condenser=condenser,
        toolbox=part(
            "toolbox",
            lambda of: (of.rollout.tools, of.sandbox, of.condenser, of.rollout.condense),
            lambda: _toolbox(config, sandbox, condenser, objects),
        ),
        sandbox=sandbox,
        objects=objects,
        estimator=estimator,
        objective=objective,
    )


def _signal(make: Callable[[ModuleType], Any]) -> Any:  # noqa: ANN401  a part of ``learning_signal``
    """A part that only training uses; None without torch, where nothing trains."""
    if find_spec("torch") is None:
        return None
    from condensegrpo.assembly import learning_signal

    return make(learning_signal)


def _together(*makes: Callable[[], Any]) -> list[Any]:
    """The results of some functions; if some fail, all faults are reported at once."""
    made, faults = [], list[ConfigError]()
    for make in makes:
        try:
            made.append(make())
        except ConfigError as error:
            faults.append(error)
    if len(faults) > 1:
        raise ConfigError("\n".join(map(str, faults))) from faults[0]
    if faults:
        raise faults[0]
    return made


def build_condenser(use: CondenserUse, objects: Objects = NO_OBJECTS) -> Condenser:
    """The condenser of a section, which may ask another model for texts."""
    return use.build(objects, open_writer=_open_writer)


def _open_writer(*arguments: Any, **options: Any) -> TextWriter:  # noqa: ANN401  those of open_writer
    from condensegrpo.samplers.writers import open_writer  # imports aiohttp

    return open_writer(*arguments, **options)


def _sandbox(config: RunConfig) -> Sandbox:
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


def _toolbox(config: RunConfig, sandbox: Sandbox, condenser: Condenser, objects: Objects) -> Toolbox:
    """The tools, those of the condenser among them, and how the policy calls them."""
    settings = config.rollout.tools
    form = settings.call_format.build()
    tools = {use.label: use.build(objects, sandbox=sandbox) for use in settings.tools}
    if len(tools) != len(settings.tools):
        raise ConfigError(
            f"checking rollout.tools.use: two tools have one name in {[use.name for use in settings.tools]}."
        )
    if form.only_tool and set(tools) != {form.only_tool}:
        raise ConfigError(
            f"checking rollout.tools.use: found {', '.join(tools) or 'none'}, and rollout.tools.format="
            f"{settings.call_format.name} runs the tool {form.only_tool} and no other. Set "
            f"rollout.tools.use=[{form.only_tool}], or another format."
        )
    toolbox, offered = Toolbox(tools, format=form, limits=settings), checked_tools(condenser.tools())
    if not offered:
        return toolbox
    _check_offered(config, form, offered)
    try:
        return toolbox.with_condenser_tools(offered)
    except ValueError as error:
        raise ConfigError(
            f"setting up the condenser {config.condenser.name}: {error}. The tools of the run are: "
            f"{', '.join(tools) or 'none'} (rollout.tools.use)."
        ) from error


def _check_offered(config: RunConfig, form: ToolFormat, offered: Sequence[EnvironmentTool]) -> None:
    """Check that the policy can call the tools of the condenser, and that they take effect at once."""
    names = ", ".join(tool.name for tool in offered)
    if form.only_tool:
        raise ConfigError(
            f"checking condenser.name: {config.condenser.name} offers {names}, and rollout.tools.format="
            f"{config.rollout.tools.call_format.name} runs the tool {form.only_tool} and no other. Set "
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
