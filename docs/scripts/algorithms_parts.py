"""What the scripts behind docs/reference/estimators.md share: tables in Markdown, and turns made by hand."""

from collections.abc import Sequence

from condensegrpo.core.messages import Message
from condensegrpo.core.trajectory import Turn


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float, digits: int = 3) -> str:
    """A number as the page writes it, with a true minus sign and no minus before zero."""
    rounded = round(value, digits) + 0.0  # −0.0 + 0.0 is 0.0
    return f"{rounded:.{digits}f}".replace("-", "−")


def percent(share: float) -> str:
    """A share in whole percent; what is less than half of one and not nothing says so."""
    return "<1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def turn_of(prompt_ids: tuple[int, ...], output: int, *, result: bool = False) -> Turn:
    """A turn of so many sampled tokens, answered by a tool result or not."""
    answer = (Message(role="tool", content="4", tool_call_id="call"),) if result else ()
    return Turn(
        prompt_ids=prompt_ids,
        output_ids=(0,) * output,
        logprobs=(-1.0,) * output,
        policy_version=0,
        context=(),
        reply=Message(role="assistant", content="yes"),
        observations=answer,
    )
