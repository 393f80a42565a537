"""Whether a question fits the context budget."""

from collections.abc import Sequence

from condensegrpo.core.errors import ContextOverflow
from condensegrpo.core.messages import Message
from condensegrpo.rollout.render import Renderer
from condensegrpo.rollout.settings import Limits


def check_pinned(renderer: Renderer, pinned: Sequence[Message], limits: Limits) -> None:
    """Check that system message and question alone fit the context budget: no condenser may touch them.

    Raises:
        ContextOverflow: they do not fit, and nothing can be sampled.
    """
    tokens = renderer.count(pinned)
    if tokens > limits.max_context_tokens:
        raise ContextOverflow(
            f"checking the question: system message and question need {tokens} tokens with the chat template, and the "
            f"context budget is {limits.max_context_tokens}. Raise rollout.limits.max_context_tokens to at least "
            f"{tokens} and leave room for the turns; a condenser never shortens the question."
        )
