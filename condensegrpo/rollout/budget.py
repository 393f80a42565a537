"""What an episode may cost: replies, tokens and seconds, each limited on its own."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from condensegrpo.core.errors import ContextOverflow
from condensegrpo.core.messages import Message
from condensegrpo.rollout.render import Renderer


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one episode. The time limit of a tool call is the toolbox's own."""

    max_turns: int  # replies, every one counted
    max_context_tokens: int  # of one turn's prompt, template included
    max_output_tokens: int  # sampled in one turn
    max_tool_turns: int | None = None  # replies whose tool calls are run; None: all
    turn_seconds: float = (
        600.0  # of one reply (waiting for a batch included), of one environment step, of one condensing
    )

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "max_tool_turns" and not value > 0:
                raise ValueError(f"a limit must be positive: {name} is {value}")
        if self.max_tool_turns is not None and self.max_tool_turns < 0:
            raise ValueError(f"max_tool_turns is {self.max_tool_turns}: wanted at least 0, or None for no limit")


def check_pinned(renderer: Renderer, pinned: Sequence[Message], limits: Limits) -> None:
    """Check that system message and question alone fit the context budget: no condenser may touch them.

    Raises:
        ContextOverflow: they do not fit, and nothing can be sampled.
    """
    tokens = renderer.count(pinned)
    if tokens > limits.max_context_tokens:
        raise ContextOverflow(
            f"checking the question: system message and question need {tokens} tokens with the chat template, and the "
            f"context budget is {limits.max_context_tokens}. Raise rollout.max_context_tokens to at least {tokens} and "
            f"leave room for the turns; a condenser never shortens the question."
        )
