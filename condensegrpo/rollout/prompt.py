"""The prompt of the next turn: the last one continued by token ids, or a fresh render that is declared as condensation.

    turn 0   head                                          rendered
    turn 1   head u0                                       turn 0's prompt + its output + what came back: by ids
    turn 2   head [turn 0 …] u1                            u0 was dropped: rendered, Condensation(tokens 90 → 55)
    turn 3   head [turn 0 …] u1 u2                         nothing new was dropped: turn 2 continued by ids, undeclared

No token that was sampled is ever tokenised anew and taken for a continuation: what does not continue is declared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from condensegrpo.errors import ContextOverflow
from condensegrpo.messages import History, Message, Unit, flatten
from condensegrpo.protocols import Budget, Condensed
from condensegrpo.rollout.boundary import guarded
from condensegrpo.rollout.budget import check_head
from condensegrpo.rollout.engine import Engine
from condensegrpo.trajectory import Condensation, Fate, Span, Stop

CHAT_TEMPLATE = "chat_template"  # the condenser's name where only the template rewrote something


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the policy is shown."""

    ids: tuple[int, ...]  # (P,)
    context: tuple[Message, ...]  # what ids render: the head and the messages of the units
    units: tuple[Unit, ...] = ()  # shown after the head; a condenser may have rewritten them
    spans: tuple[Span, ...] = ()  # of the last condensation; units younger than that are shown whole
    condensation: Condensation | None = None  # None: ids continue the last prompt and output


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A prompt with the reply that it got."""

    prompt: Prompt
    output_ids: tuple[int, ...]  # (A,)


async def next_prompt(engine: Engine, history: History, last: Asked | None, draw: float) -> Prompt:
    """The prompt of the turn that follows ``history``, of at most ``max_context_tokens``.

    Args:
        history: the raw units, whatever earlier turns were shown: a condenser never sees its own work again.
        last: the turn before; None in the first.
        draw: in [0, 1), of the problem: where in the trigger's jitter it is condensed.

    Raises:
        ContextOverflow: neither the continuation nor what the condenser left fits.
        Ended: the condenser failed or took too long.
    """
    if last is None:
        check_head(engine.renderer, history.head, engine.limits)
        return Prompt(ids=tuple(engine.renderer.prompt(history.head)), context=history.head)
    budget, grown = engine.limits.max_context_tokens, None
    if engine.trigger.when == "over_budget":
        grown = _grown(engine, history, last)
        if len(grown.ids) <= engine.trigger.at(budget, draw):
            return grown
    condensed = await _condense(engine, history, room=engine.trigger.room(budget, draw))
    if tuple(condensed.units) == (*last.prompt.units, history.units[-1]):
        grown = grown or _grown(engine, history, last)
        if len(grown.ids) <= budget:
            return grown
    return _rewritten(engine, history, condensed)


def _grown(engine: Engine, history: History, last: Asked) -> Prompt:
    """All that was shown and the newest unit: by ids, or rendered and declared if the template rewrites replies."""
    newest = history.units[-1]
    units = (*last.prompt.units, newest)
    context = flatten(history.head, units)
    added = engine.renderer.continuation(last.prompt.context, newest.reply, newest.results, last.output_ids)
    continued = (*last.prompt.ids, *last.output_ids, *added)
    if engine.renderer.keeps_replies(context):
        return Prompt(ids=continued, context=context, units=units, spans=last.prompt.spans)
    ids = tuple(engine.renderer.prompt(context))
    spans = _spans(engine, history, last.prompt.spans)
    declared = Condensation(
        condenser=CHAT_TEMPLATE,
        reason="the chat template renders earlier replies otherwise than they were sampled (it strips their reasoning)",
        tokens_before=len(continued),
        tokens_after=len(ids),
        spans=spans,
    )
    return Prompt(ids=ids, context=context, units=units, spans=spans, condensation=declared)


def _rewritten(engine: Engine, history: History, condensed: Condensed) -> Prompt:
    """What the condenser left, rendered and declared."""
    context = flatten(history.head, condensed.units)
    ids = tuple(engine.renderer.prompt(context))
    budget = engine.limits.max_context_tokens
    if len(ids) > budget:
        raise ContextOverflow.at(turn=len(history.units), tokens=len(ids), budget=budget)
    # not count(history.messages): in every turn that would render everything said so far
    tokens_before = engine.renderer.count(history.head) + sum(span.tokens for span in condensed.spans)
    declared = Condensation(
        condenser=engine.condenser_name,
        reason=condensed.reason,
        tokens_before=tokens_before,
        tokens_after=len(ids),
        spans=condensed.spans,
    )
    return Prompt(ids=ids, context=context, units=condensed.units, spans=condensed.spans, condensation=declared)


async def _condense(engine: Engine, history: History, *, room: int) -> Condensed:
    """Ask the condenser to leave at most ``room`` tokens, and hold it to its contract."""
    return await guarded(
        partial(_accounted, engine, history, room),
        who=f"the condenser {engine.condenser_name!r}",
        stop=Stop.ENVIRONMENT_ERROR,
        seconds=engine.limits.turn_seconds,
    )


async def _accounted(engine: Engine, history: History, room: int) -> Condensed:
    budget = Budget(tokens=room, count=engine.renderer.count, scorers=engine.scorers)
    with engine.stopwatch:
        condensed = await engine.condenser.condense(history, budget, engine.toolbox.schemas)
    if not isinstance(condensed, Condensed):
        raise TypeError(f"condense() gave {condensed!r:.80}, wanted a Condensed")
    _check_account(history.units, condensed)
    return condensed


def _check_account(units: Sequence[Unit], condensed: Condensed) -> None:
    """Every unit has one span, in order; what is shown are units of the history, in order; and the spans are true."""
    wanted, found = [unit.turn for unit in units], [span.turn for span in condensed.spans]
    if found != wanted:
        raise ValueError(
            f"its spans account for the units of turns {found}, wanted each one once and in order: {wanted}"
        )
    shown = {unit.turn: unit for unit in condensed.units}
    if [unit.turn for unit in condensed.units] != [turn for turn in wanted if turn in shown]:
        raise ValueError(
            f"it shows the units of turns {[unit.turn for unit in condensed.units]}, wanted units of the history, "
            f"each at most once and in order: {wanted}"
        )
    for unit, span in zip(units, condensed.spans, strict=True):
        if span.fate is Fate.KEPT and shown.get(unit.turn) != unit:
            raise ValueError(f"its spans say that the unit of turn {unit.turn} was kept, but it is not shown verbatim")
        if span.fate is Fate.DROPPED and unit.turn in shown:
            raise ValueError(f"its spans say that the unit of turn {unit.turn} was dropped, but it is shown")


def _spans(engine: Engine, history: History, known: Sequence[Span]) -> tuple[Span, ...]:
    """One span for every unit: as the last condensation had it, and kept since."""
    count = engine.renderer.count
    head = count(history.head)
    younger = history.units[len(known) :]
    tokens = [max(count(flatten(history.head, [unit])) - head, 0) for unit in younger]
    kept = (Span(turn=unit.turn, fate=Fate.KEPT, tokens=cost) for unit, cost in zip(younger, tokens, strict=True))
    return (*known, *kept)
