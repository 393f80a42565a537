"""Plug-ins that load a model of their own. Standard library only."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class HoldsModel(Protocol):
    """A condenser or reward that may load a model: every process that plays trajectories would load it once more."""

    @property
    def holds_model(self) -> bool:
        """Whether it does. By default trajectories are then played in one process, see ``rollout.workers``."""


def any_holds_model(*plugins: object) -> bool:
    """Whether any of them holds a model."""
    return any(isinstance(plugin, HoldsModel) and plugin.holds_model for plugin in plugins)
