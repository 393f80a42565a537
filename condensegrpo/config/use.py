"""Plug-ins as a configuration names them: ``build()`` of each section makes the object.

    condenser: {name: last_k, options: {keep_last: 2}}        ─▶   config.condenser.build()   ─▶   LastK(keep_last=2)
    reward: {name: weighted_sum, options: {parts: [correct]}} ─▶   each part is built before the sum

An object that a Python program gave in place of a name is taken as it is. ``options.py`` validates the options.
"""

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Annotated, Any, ClassVar, TypeVar, cast

from pydantic import BeforeValidator, Field

from condensegrpo.config.options import build_plugin, check_plugin
from condensegrpo.config.section import Section, parse
from condensegrpo.core.condenser import Condenser, Stage
from condensegrpo.core.defaults import overrides, with_defaults
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.failures import at_definition, plugin_code
from condensegrpo.core.plugins import load_plugin, missing_methods
from condensegrpo.core.protocols.reward import GroupReward, Reward, RewardPart, TurnReward
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.protocols.task import Task
from condensegrpo.core.protocols.tool import Tool
from condensegrpo.core.protocols.tracker import Tracker
from condensegrpo.core.wording import did_you_mean
from condensegrpo.episodes.toolformats import ToolFormat, check_format

Objects = Mapping[str, object]  # by the name that the configuration has for them
NO_OBJECTS: Objects = {}
P = TypeVar("P")
U = TypeVar("U", bound="Use")
V = TypeVar("V", bound="Use")
KINDS_OF_REWARD = ("__call__", "score_group", "turn_rewards")


class Use(Section):
    """A plug-in by name (see ``condensegrpo plugins``) or as ``path/to/file.py:Name``."""

    kind: ClassVar[str]  # a member of ``core.plugin_kinds.KINDS``
    methods: ClassVar[tuple[str, ...]] = ()  # that have no default
    base: ClassVar[type] = object  # whose own methods of these names only raise
    of_function: ClassVar[str] = "a function takes them by functools.partial"  # how an object gets its options
    name: str
    """Name of an installed plug-in, or path/to/file.py:Name."""
    options: dict[str, Any] = {}
    """Keyword arguments of the plug-in."""

    def build(self, objects: Objects = NO_OBJECTS, /, **supplied: object) -> Any:  # noqa: ANN401  whatever it names
        """The object of its name, or what the plug-in makes of its options; ``supplied`` as of ``build_plugin``."""
        given = self.given(objects)
        made = build_plugin(self.kind, self.name, self.options, supplied) if given is None else given
        return with_methods(made, self.name, *self.methods, base=self.base)

    def check(self, objects: Objects = NO_OBJECTS, /, **supplied: object) -> Mapping[str, object]:
        """Check the options, and that an object or a class has the methods of its kind; returns its arguments."""
        plugin, given = self.plugin(objects), self.given(objects)
        arguments = {} if given is not None else check_plugin(self.kind, self.name, self.options, supplied)
        if given is not None or not is_factory(plugin):
            with_methods(plugin, self.name, *self.methods, base=self.base)
        return arguments

    def plugin(self, objects: Objects) -> Any:  # noqa: ANN401  whatever it names
        """The object that it names, or the class or function, not yet called."""
        return objects[self.name] if self.name in objects else load_plugin(self.kind, self.name)

    def given(self, objects: Objects) -> object | None:
        """The object that it names; None: it names a plug-in."""
        if self.name in objects and self.options:
            raise ConfigError(
                f"setting up {self.name}: found the options {', '.join(self.options)}, and it is an object, which "
                f"takes none. Construct it with them; {self.of_function}."
            )
        return objects.get(self.name)

    @property
    def label(self) -> str:
        """Its name without a file."""
        return self.name.rpartition(":")[2]

    def _with_built(self: U, option: str, kind: type[V], where: str, build: Callable[[V], object]) -> U:
        """The section, with what an option lists built: plug-ins by name or as sections."""
        if option not in self.options:
            return self
        listed = self.options[option]
        if not isinstance(listed, list | tuple):
            raise ConfigError(f"checking {where}: found {listed!r}, wanted a list of {self.kind}.")
        built = list[object]()
        for index, each in enumerate(listed):
            source = where.replace(option, f"{option}[{index}]", 1)
            built.append(build(parse(kind, _named(each), source=source)))
        return self.model_copy(update={"options": {**self.options, option: built}})


def _named(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


class CondenserUse(Use):
    """What rewrites the history before a turn."""

    kind: ClassVar[str] = "condensers"
    name: str = "full"
    """A condenser."""

    def build(self, objects: Objects = NO_OBJECTS, /, **supplied: object) -> Condenser:
        """The condenser. Where its options hold ``stages``, each of them is a condenser with a trigger."""

        def stage(each: StageUse) -> Stage:
            return Stage(name=each.label, condenser=each.build(objects, **supplied), over=each.over)

        where = f"the option stages of the condenser {self.name}"
        used = self._with_built("stages", StageUse, where, stage)
        condenser = super(CondenserUse, used).build(objects, **supplied)
        if not isinstance(condenser, Condenser):
            kind = type(condenser).__name__
            raise ConfigError(
                f"setting up the condenser {self.name}: {kind} is no Condenser{at_definition(condenser)}; wanted "
                f"class {kind}(Condenser), of condensegrpo.core.condenser."
            )
        return with_methods(condenser, self.name, "condense", base=Condenser)


class StageUse(CondenserUse):
    """A condenser in a pipeline."""

    name: str
    over: float = Field(default=1.0, ge=0, le=1)
    """Share of the budget that a prompt must exceed before this stage runs; 0: always."""


class RewardUse(Use):
    """What a trajectory is worth."""

    kind: ClassVar[str] = "rewards"
    name: str = "correct"
    """A reward."""

    def build(self, objects: Objects = NO_OBJECTS, /, **supplied: object) -> Reward | GroupReward:
        """The reward. Where its options hold ``parts``, each of them is a reward with a weight."""
        used = self._with_built(
            "parts", WeightedUse, "reward.options.parts", lambda each: each.part(objects, **supplied)
        )
        reward = used.of_one_kind(objects, **supplied)
        if isinstance(reward, TurnReward):
            raise ConfigError(
                f"setting up the reward {self.name}: it pays single turns and says nothing of the outcome. Make it a "
                f"part of a weighted_sum beside one that does, such as correct: "
                f"reward={{name: weighted_sum, options: {{parts: [{{name: correct}}, {{name: {self.name!r}}}]}}}}."
            )
        return reward

    def of_one_kind(self, objects: Objects, /, **supplied: object) -> Reward | GroupReward | TurnReward:
        """The reward, if it has exactly one of the methods of ``KINDS_OF_REWARD``: with two it would be ambiguous."""
        reward = super().build(objects, **supplied)
        present = [method for method in KINDS_OF_REWARD if hasattr(reward, method)]
        if len(present) != 1:
            raise ConfigError(
                f"setting up the reward {self.name}: {type(reward).__name__} has "
                f"{' and '.join(present) or 'no method of a reward'}, wanted exactly one of "
                f"{', '.join(KINDS_OF_REWARD)}{at_definition(reward)}; see docs/how-to/write-a-reward.md."
            )
        base = {"score_group": GroupReward, "turn_rewards": TurnReward}.get(present[0])
        made: Any = with_methods(reward, self.name, present[0])
        return cast(Reward, made if base is None else with_defaults(made, base))


class WeightedUse(RewardUse):
    """A reward in a weighted sum."""

    name: str
    weight: float = Field(default=1.0, ge=0)

    def part(self, objects: Objects, /, **supplied: object) -> RewardPart:
        """The part of the sum."""
        if "parts" in self.options:
            raise ConfigError(
                f"setting up the part {self.name} of reward.options.parts: it has parts of its own, and a part is a "
                f"single reward. List them beside the others, each with the product of the two weights."
            )
        built = self.of_one_kind(objects, **supplied)
        if isinstance(built, GroupReward):
            raise ConfigError(
                f"setting up the part {self.name} of reward.options.parts: it scores a group as a whole, and a "
                f"weighted sum scores one trajectory at a time. Use it alone: reward.name={self.name}."
            )
        return RewardPart(name=self.label, weight=self.weight, reward=built)


class SamplerUse(Use):
    """What samples replies."""

    kind: ClassVar[str] = "samplers"
    methods: ClassVar[tuple[str, ...]] = ("sample",)
    base: ClassVar[type] = Sampler
    name: str = "transformers"
    """A sampler."""


class TaskUse(Use):
    """Where the problems come from."""

    kind: ClassVar[str] = "tasks"
    methods: ClassVar[tuple[str, ...]] = ("problems", "environment")
    base: ClassVar[type] = Task
    data: str | None = None
    """Training problems: a JSONL or Parquet file, a folder or a Hub id."""
    eval_data: str | None = None
    """Held-out problems, likewise."""

    def build_with(self, objects: Objects, shared: Mapping[str, tuple[str, object]]) -> Task:
        """The task; ``shared``: options that are settings of the rollout, with the key and the value of each."""
        if self.given(objects) is not None:
            return cast(Task, self.build(objects))
        files = {"data": self.data, "eval_data": self.eval_data}
        options = {**{key: file for key, file in files.items() if file is not None}, **self.options}
        parameters = inspect.signature(self.plugin(objects)).parameters
        for key in files:
            if key not in options and key in parameters and parameters[key].default is inspect.Parameter.empty:
                raise ConfigError(
                    f"checking task.{key}: it is not set, and the task {self.name} reads its problems from there. "
                    f"Set it to a JSONL or Parquet file, a folder of them or a Hub id, such as "
                    f"task.{key}={key}.jsonl."
                )
        for option, (source, value) in shared.items():
            if option in options:
                raise ConfigError(
                    f"checking task.options.{option}: found {options[option]!r}; the task gets it from {source}, "
                    f"which is {value!r}. Remove task.options.{option} and set {source}."
                )
        supplied = {option: value for option, (_, value) in shared.items()}
        return cast(Task, self.model_copy(update={"options": options}).build(objects, **supplied))


class ToolUse(Use):
    """A tool of the policy."""

    kind: ClassVar[str] = "tools"
    of_function: ClassVar[str] = "a tool with options is a class whose __call__ is the tool"

    def build(self, objects: Objects = NO_OBJECTS, /, **supplied: object) -> Tool:
        """A function is the tool; a class is built with its options, and its ``__call__`` is the tool."""
        self.given(objects)
        tool = self.plugin(objects)
        if inspect.isclass(tool):
            tool = build_plugin("tools", self.name, self.options, supplied)
        elif self.options:
            raise ConfigError(
                f"setting up the tool {self.name} with {self.options}: it is no class and has no options; "
                f"{self.of_function}."
            )
        if not callable(tool):
            raise ConfigError(
                f"setting up the tool {self.name}: found {tool!r:.80}{at_definition(tool)}, wanted a function with "
                f"type hints and a docstring, or an object whose __call__ is one."
            )
        return cast(Tool, tool if inspect.isroutine(tool) else tool.__call__)


class FormatUse(Use):
    """How the policy calls tools."""

    kind: ClassVar[str] = "tool_formats"
    methods: ClassVar[tuple[str, ...]] = ("parse", "result")
    base: ClassVar[type] = ToolFormat

    def build(self, objects: Objects = NO_OBJECTS, /, **supplied: object) -> ToolFormat:
        """The format, tried on made-up values."""
        made = super().build(objects, **supplied)
        form = with_defaults(made, ToolFormat)
        with plugin_code(f"trying the tool format {self.name}{at_definition(made)}", ConfigError):
            check_format(form)
        return form


class TrackerUse(Use):
    """Where metrics are sent."""

    kind: ClassVar[str] = "trackers"
    methods: ClassVar[tuple[str, ...]] = ("log",)
    base: ClassVar[type] = Tracker


NamedTracker = Annotated[TrackerUse, BeforeValidator(_named)]  # its name alone stands for it, where no option is set


def is_factory(plugin: object) -> bool:
    """Whether what a name stands for makes a plug-in of which nothing is known before: it is called and no class."""
    return callable(plugin) and not isinstance(plugin, type)


def with_methods(plugin: P, name: str, *methods: str, base: type = object) -> P:
    """The plug-in, if it has the methods that have no default: it may inherit nothing, so nothing else would notice."""
    inherited = (each for each in methods if hasattr(base, each) and not overrides(plugin, getattr(base, each)))
    if missing := missing_methods(plugin, *methods) or tuple(inherited):
        kind = plugin if isinstance(plugin, FunctionType | type) else type(plugin)
        raise ConfigError(
            f"setting up {name}: {kind.__name__} has no {' and no '.join(missing)}{at_definition(plugin)}. "
            f"{did_you_mean(missing[0], vars(kind))}See docs/reference/protocols.md."
        )
    return plugin
