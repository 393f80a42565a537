"""Tools: what a reply may call. Standard library only."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from condensegrpo.core.messages import History, MediaPart

NULL_IF_EMPTY = ("properties", "required")  # keys of a JSON schema, as servers in Go write them
Tool = Callable[..., object]  # a typed function with a docstring, sync or async; the model reads its result as JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a tool of an environment gave back. ``done`` ends the episode when all calls of the reply have returned."""

    text: str  # what the policy reads; shortened like any result
    media: tuple[MediaPart, ...] = ()  # shown after the text, with their bytes: ``MediaPart.of``
    done: bool = False
    answer: str | None = None
    outcome: float | None = None  # with ``done``: as in ``Step``
    turn_rewards: Mapping[str, float] = field(default_factory=dict)


async def _answered_in_step(arguments: Mapping[str, Any], history: History) -> ToolResult | str:
    raise RuntimeError("the tool has no call, and its environment does not answer calls itself")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentTool:
    """A tool of one episode, beside those of the run. It is called, limited and counted as they are.

    What it raises is an observation; ``EnvironmentLost`` ends the episode as ``environment_error``.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of the arguments: {"type": "object", "properties": …, "required": […]}
    # arguments; the history before the reply. Not called where the environment answers calls itself
    call: Callable[[Mapping[str, Any], History], Awaitable[ToolResult | str]] = _answered_in_step

    def __post_init__(self) -> None:  # chat templates loop over these keys
        kept = {key: value for key, value in self.parameters.items() if value is not None or key not in NULL_IF_EMPTY}
        object.__setattr__(self, "parameters", kept)

    @property
    def schema(self) -> dict[str, object]:
        """As chat templates and tool formats show it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}
