"""Shared by condensers that summarise: the instruction, the units to replace, usable summaries, and the fallback."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from string import Template

from condensegrpo.condensers.fit import newest_that_fit, total
from condensegrpo.condensers.observation_mask import ObservationMask
from condensegrpo.core.condenser import Budget, Condensed, Count, WrittenSummary
from condensegrpo.core.errors import SummaryRefused
from condensegrpo.core.messages import History, Message, Unit, note
from condensegrpo.core.trajectory import FinishReason
from condensegrpo.core.wording import plural


def read_instruction(path: str | None) -> Template:
    """The text of a file; by default that of the package, with the sections facts, done, pending, failed, next.

    Its fields are ``$tokens``, the maximum length of a summary, and ``$kept``, the number of kept units.
    """
    source = Path(path) if path else Path(str(files("condensegrpo.condensers"))) / "summary.txt"
    try:
        instruction = Template(source.read_text(encoding="utf-8").strip())
    except OSError as error:
        raise ValueError(f"reading the template {source}: {error.strerror}") from error
    try:
        instruction.substitute(tokens=0, kept=0)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"reading the template {source}: {error}; its fields are $tokens and $kept, and a dollar is $$"
        ) from error
    return instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryPlan:
    """The units that a summary replaces, and those that stay."""

    covered: tuple[Unit, ...]  # the oldest, an earlier summary among them
    kept: tuple[Unit, ...]  # the newest, at least one; they stay verbatim

    @property
    def view(self) -> tuple[Unit, ...]:
        """All units, in order."""
        return (*self.covered, *self.kept)


def summary_plan(history: History, budget: Budget, *, keep_last: int, room: int, always: bool) -> SummaryPlan | None:
    """The units to summarise: all but the newest ``keep_last``, or fewer of those if they leave a summary no room.

    None if the history is within the budget, if no unit is new, or if the newest unit by itself exceeds the budget.

    Args:
        room: tokens that a summary may have.
        always: summarise what is within the budget too.
    """
    view = history.current_units
    if not always and total(view) <= budget.tokens:
        return None
    kept = newest_that_fit(view[-keep_last:], max(budget.tokens - room, 0))
    covered = view[: len(view) - len(kept)]
    if all(unit.is_note for unit in covered) or total(kept) > budget.tokens:
        return None
    return SummaryPlan(covered=covered, kept=kept)


def empty_summary_tokens(pinned: Sequence[Message], count: Count) -> int:
    """The tokens that a summary without any text takes after the pinned messages."""
    empty = note(History(pinned=()), [Unit(turn=0, reply=Message(role="assistant", content=""))], "")
    return count((*pinned, *empty.messages)) - count(pinned)


def finished_text(written: WrittenSummary) -> str:
    """A text without the thinking before it; a SummaryRefused if it was cut off or is empty."""
    if written.finish is not FinishReason.STOP:
        raise SummaryRefused("it was cut off by its length")
    text = written.text.rpartition("</think>")[2].strip()
    if not text or "<think>" in text:
        raise SummaryRefused("it is empty")
    return text


def usable(written: WrittenSummary, plan: SummaryPlan, history: History, budget: Budget) -> Unit:
    """The note with the summary in a text, without the thinking before it. Special tokens in it are text.

    A text that was cut off, is empty, is not shorter than what it replaces, or does not fit, is a SummaryRefused.
    """
    text = finished_text(written)
    summary = note(history, plan.covered, text, how="summarised above")
    if written.tokens is not None and text == written.text.strip():
        estimates = summary.tokens - note(history, plan.covered, "", how="summarised above").tokens
        summary = replace(summary, tokens=summary.tokens - estimates + written.tokens)
    after = summary.tokens + total(plan.kept)
    if after > budget.tokens:
        raise SummaryRefused(f"with it the units have {after} tokens, and {budget.tokens} are allowed")
    if summary.tokens >= total(plan.covered):
        raise SummaryRefused(
            f"it is not shorter than what it replaces: {summary.tokens} tokens, and {total(plan.covered)} before"
        )
    return summary


def summarised(summary: Unit, plan: SummaryPlan, rejected: Sequence[str]) -> Condensed:
    """A history whose oldest units are replaced by a new summary."""
    after = f" after {len(rejected)} that cannot be used" if rejected else ""
    return Condensed(
        units=(summary, *plan.kept),
        reason=f"summarised {plural(len(plan.covered), 'unit')}{after}",
        note=summary,
        rejected=tuple(rejected),
    )


async def without_summary(history: History, budget: Budget, *, why: str, rejected: Sequence[str] = ()) -> Condensed:
    """A history without a new summary: unchanged if it fits, else with old results masked."""
    view = history.current_units
    if total(view) <= budget.tokens:
        units, reason = view, ""
    else:
        masked = await ObservationMask(keep=1).condense(history.with_units(view), budget)
        units, reason = masked.units, masked.reason
    return Condensed(
        units=units,
        reason="; ".join(part for part in (why, reason) if part),
        rejected=tuple(rejected),
    )
