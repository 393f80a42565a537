"""The kinds of plug-ins, and where a configuration names those of each. Standard library only."""

from collections.abc import Mapping
from typing import NamedTuple


class Kind(NamedTuple):
    """The place in a configuration that names the plug-ins of a kind."""

    section: str  # that holds their options; of a list the key, followed by []
    key: str = "name"  # of the section, whose value is the name; empty: the name may stand in place of the section
    argument: str = ""  # of ``condensegrpo.train`` and others that take objects; empty: there is none

    @property
    def is_list(self) -> bool:
        """Whether a configuration lists several plug-ins of the kind."""
        return self.section.endswith("[]")

    def override(self, name: str) -> str:
        """The override that names a plug-in: ``reward.name=mine.py:Mine``, ``trackers=[mine.py:Mine]``."""
        if self.is_list:
            return f"{self.section.removesuffix('[]')}=[{name}]"
        return f"{'.'.join(filter(None, (self.section, self.key)))}={name}"


KINDS: Mapping[str, Kind] = {
    "condensers": Kind("condenser", argument="condenser"),
    "rewards": Kind("reward", argument="reward"),
    "tasks": Kind("task", argument="task"),
    "tools": Kind("rollout.tools.use[]", key="", argument="tools"),
    "tool_formats": Kind("rollout.tools.format", key=""),
    "estimators": Kind("algorithm.advantage", key="estimator"),
    "losses": Kind("algorithm.loss"),
    "samplers": Kind("sampler", argument="sampler"),
    "trackers": Kind("trackers[]", key=""),
}
