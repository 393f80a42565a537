"""What the context of each turn is made of, in tokens, computed from a stored trajectory without a tokenizer.

Worked example, budget 64: pinned messages of 18 tokens, units of 13 and 12 (each a reply and what answered it).

    turn 0   prompt 18             pinned 18
    turn 1   prompt 31, continues  pinned 18, newest observation 4, kept 9                    units: kept
    turn 2   prompt 30, condensed  pinned 18, newest observation 4, kept 8, saved 13 of 43    units: dropped, kept
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from condensegrpo.core.messages import Message
from condensegrpo.core.trajectory import Condensation, SpanStatus, Trajectory, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextView:
    """The make-up of one prompt; pinned + kept + rewritten + newest is its length exactly."""

    turn: int
    statuses: Mapping[int, SpanStatus]  # what this prompt shows of every unit before it, by turn
    tokens: int  # of the prompt
    pinned: int  # system message, question, examples
    kept: int  # earlier units, verbatim
    rewritten: int  # text in place of units that were rewritten or dropped
    newest: int  # what answered the last reply
    saved: int  # tokens that the prompt would hold besides, had nothing ever been condensed
    free: int  # up to the budget
    budget: int

    @property
    def strip(self) -> str:
        """What the prompt shows of each earlier turn, a letter each: k kept, d dropped, r rewritten, - none."""
        shown = (self.statuses.get(earlier, "-") for earlier in range(self.turn))
        return "".join(status[0] for status in shown)


def context_views(trajectory: Trajectory, budget: int) -> tuple[ContextView, ...]:
    """The make-up of every prompt of a trajectory against a budget in tokens."""
    views: list[ContextView] = []
    for index, turn in enumerate(trajectory.turns):
        if turn.condensation is not None:
            views.append(_condensed(index, trajectory.turns, turn.condensation, budget))
        elif index == 0:
            views.append(_view(0, {}, tokens=len(turn.prompt_ids), pinned=len(turn.prompt_ids), budget=budget))
        else:
            views.append(_continued(index, trajectory.turns, views[-1], budget))
    return tuple(views)


def newest_messages(context: Sequence[Message]) -> tuple[Message, ...]:
    """The messages after the last reply in a context; none if there is no reply."""
    replies = [index for index, message in enumerate(context) if message.role == "assistant"]
    return tuple(context[replies[-1] + 1 :]) if replies else ()


def _continued(index: int, turns: Sequence[Turn], last: ContextView, budget: int) -> ContextView:
    """A prompt that begins with the last prompt and output: everything in it stays what it was."""
    tokens, output = len(turns[index].prompt_ids), len(turns[index - 1].output_ids)
    return _view(
        index,
        {**last.statuses, index - 1: SpanStatus.KEPT},
        tokens=tokens,
        pinned=min(last.pinned, tokens),
        rewritten=last.rewritten,
        newest=max(0, tokens - last.tokens - output),
        saved=last.saved,
        budget=budget,
    )


def _condensed(index: int, turns: Sequence[Turn], declared: Condensation, budget: int) -> ContextView:
    tokens = len(turns[index].prompt_ids)
    first = len(turns[0].prompt_ids)
    if turns[0].condensation is not None:  # the prompt before condensing without its units
        first = max(0, declared.tokens_before - sum(span.tokens for span in declared.spans))
    pinned = min(tokens, first)
    kept = sum(span.tokens for span in declared.spans if span.status is SpanStatus.KEPT)
    changed = any(span.status is not SpanStatus.KEPT for span in declared.spans)
    return _view(
        index,
        {turn: span.status for span in declared.spans for turn in span.turns if turns[turn].kind == "act"},
        tokens=tokens,
        pinned=pinned,
        rewritten=max(0, tokens - pinned - kept) if changed else 0,
        newest=_newest(index, turns, declared, tokens - pinned),
        saved=max(0, declared.tokens_before - tokens),
        budget=budget,
    )


def _view(
    index: int,
    statuses: Mapping[int, SpanStatus],
    *,
    tokens: int,
    pinned: int,
    rewritten: int = 0,
    newest: int = 0,
    saved: int = 0,
    budget: int,
) -> ContextView:
    """A view whose parts add up: what is neither pinned, newest nor rewritten was kept."""
    newest = min(newest, tokens - pinned)
    rewritten = min(rewritten, tokens - pinned - newest)
    return ContextView(
        turn=index,
        statuses=statuses,
        tokens=tokens,
        pinned=pinned,
        kept=tokens - pinned - newest - rewritten,
        rewritten=rewritten,
        newest=newest,
        saved=saved,
        free=max(0, budget - tokens),
        budget=budget,
    )


def _newest(index: int, turns: Sequence[Turn], declared: Condensation, room: int) -> int:
    """Tokens of the newest observation: known if its unit alone was kept, else shared out by characters."""
    if index == 0 or not declared.spans:
        return 0
    last = declared.spans[-1]
    latest = max((earlier for earlier in range(index) if turns[earlier].kind == "act"), default=-1)
    if last.status is SpanStatus.KEPT and last.first == last.last == latest:
        return min(room, max(0, last.tokens - len(turns[latest].output_ids)))
    context = turns[index].context
    body = context[len(turns[0].context) :]
    shown = sum(len(message.text) for message in newest_messages(context))
    total = sum(len(message.text) for message in body)
    return min(room, round(room * shown / total)) if total else 0
