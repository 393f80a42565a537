"""What a configuration builds, once: evaluations and variants share every part that their settings leave the same."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from condensegrpo.config.schema import RunConfig
from condensegrpo.config.use import Objects
from condensegrpo.core.condenser import Condenser
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.failures import at_definition, plugin_code
from condensegrpo.core.protocols.reward import GroupReward, Reward
from condensegrpo.core.protocols.task import Problem, Split, Task
from condensegrpo.episodes.toolcalls import Toolbox
from condensegrpo.sandbox.sandbox import Sandbox

if TYPE_CHECKING:  # they import torch
    from condensegrpo.algorithms.credit import Estimator
    from condensegrpo.algorithms.objective import ObjectiveFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """The parts of a run besides the model, built by ``build``, or without its checks by ``build_components``."""

    config: RunConfig
    task: Task
    problems: Callable[[Split], Sequence[Problem]]  # of a split, which is read once, when it is first needed
    reward: Reward | GroupReward
    condenser: Condenser
    toolbox: Toolbox
    sandbox: Sandbox  # given to the reward and the tools that run code; its process starts when one of them opens it
    estimator: "Estimator"  # of the advantage of every turn, (N, K)
    objective: "ObjectiveFunction"
    objects: Objects = field(default_factory=dict)  # by the names that the configuration has for them
    evaluations: Mapping[str, "Components"] = field(default_factory=dict)  # by name, the held-out problems first

    def held_out(self) -> Sequence[Problem]:
        """The problems that an evaluation plays."""
        known, settings = self.problems("eval"), self.config.evaluate
        if len(known) <= settings.skip:
            raise ConfigError(
                f"choosing the held-out problems: evaluate.skip is {settings.skip} and the task has {len(known)}. "
                f"Lower it, or give the task more (task.options.eval_problems, task.eval_data)."
            )
        return known[settings.skip : settings.skip + settings.problems]


def read_problems(task: Task, split: Split) -> Sequence[Problem]:
    """Read the problems of a split."""
    with plugin_code(f"making the {split} problems of the task", ConfigError):
        split_problems = task.problems(split)
        is_sequence = hasattr(split_problems, "__len__") and hasattr(split_problems, "__getitem__")
        if is_sequence and not len(split_problems):
            raise ConfigError(
                f"reading the {split} problems of the task: found none. Check task.data and task.eval_data; where a "
                f"share of few questions is held out, none may be: set task.eval_data, or raise "
                f"task.options.eval_share."
            )
        found = split_problems[0] if is_sequence else split_problems
        if not isinstance(found, Problem):
            what = "the first is" if is_sequence else "problems() returned"
            raise ConfigError(
                f"making the {split} problems of the task: {what} {found!r:.80}, wanted a sequence of Problem objects, "
                f"such as a list{at_definition(task)}."
            )
    return split_problems
