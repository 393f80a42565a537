"""The prompt of the next turn: the last one continued by token ids, or a fresh render that is declared as condensation.

    turn 0   pinned                                        rendered
    turn 1   pinned u0                                     turn 0's prompt + its output + what came back: by ids
    turn 2   pinned [turn 0 …] u1                          u0 was dropped: rendered, Condensation(tokens 90 → 55)
    turn 3   pinned [turn 0 …] u1 u2                       nothing new was dropped: turn 2 continued by ids, undeclared

Sampled tokens are never tokenised again to continue a prompt: a prompt that does not continue by ids is declared.
"""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace

from condensegrpo.core.condenser import (
    Budget,
    Condensed,
    Request,
    WriteSummary,
    condensation_spans,
    unit_positions,
    with_tokens,
)
from condensegrpo.core.errors import ContextOverflow, SummaryRefused
from condensegrpo.core.messages import History, Message, Unit, flatten
from condensegrpo.core.protocols.environment import RewrittenHistory
from condensegrpo.core.shared_sequence import shared, shared_ids
from condensegrpo.core.trajectory import Condensation
from condensegrpo.episodes.boundary import Boundary
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.render import Renderer
from condensegrpo.episodes.settings import Limits

CHAT_TEMPLATE = "chat_template"  # the condenser's name where only the template rewrote something
REPEATS = 3  # calls of a condenser that follow one whose units were over budget as a prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the policy is shown."""

    ids: Sequence[int]  # (P,)
    context: Sequence[Message]  # what ids render: the pinned messages and the messages of the units
    units: Sequence[Unit] = ()  # shown after the pinned messages; a condenser may have rewritten them
    condensation: Condensation | None = None  # None: ids continue the last prompt and output
    media: tuple[str, ...] = ()  # the hashes of the pictures in the context, in order


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredView:
    """A view with the reply to it and what answered the reply: where the next view begins."""

    view: View
    output_ids: tuple[int, ...]  # (A,) as sampled
    added_ids: tuple[int, ...]  # that lead from the output to the next prompt
    unit: Unit  # with its tokens
    whole: bool  # False: the chat template renders earlier replies differently from how they were sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class NextView:
    """The view of the next turn, with what the condenser wrote and rejected."""

    view: View
    history: History  # with the condenser's note, if it made one
    rejected: tuple[str, ...] = ()  # Condensed.rejected


def check_pinned(renderer: Renderer, pinned: Sequence[Message], limits: Limits) -> None:
    """Check that system message and question alone fit the context budget: no condenser may touch them."""
    tokens = renderer.count(pinned)
    if tokens > limits.max_context_tokens:
        raise ContextOverflow(
            f"checking the question: system message and question need {tokens} tokens with the chat template, and the "
            f"context budget is {limits.max_context_tokens}. Raise rollout.limits.max_context_tokens to at least "
            f"{tokens} and leave room for the turns; a condenser never shortens the question."
        )


def answered(
    engine: Engine, pinned: tuple[Message, ...], view: View, output_ids: tuple[int, ...], unit: Unit
) -> AnsweredView:
    """A view with a reply and what answered it; counts the unit."""
    added = tuple(engine.renderer.continuation(view.context, unit.reply, unit.results, output_ids, view.ids))
    whole = engine.renderer.keeps_replies((*view.context, *unit.messages))
    unit = replace(unit, tokens=len(output_ids) + len(added) if whole else 0)
    past = History(pinned=pinned, units=(unit,))
    if not unit.tokens or any(message.media for message in unit.results):
        (unit,) = with_tokens(past, engine.renderer.count).units
    return AnsweredView(view=view, output_ids=output_ids, added_ids=added, unit=unit, whole=whole)


async def next_view(
    engine: Engine,
    history: History,
    last: AnsweredView | None,
    *,
    draw: float,
    write: WriteSummary | None = None,
    writes: int = 0,
    texts: Sequence[object] = (),
    rewritten: RewrittenHistory | None = None,
) -> NextView:
    """The view of the turn that follows ``history``, of at most ``max_context_tokens``.

    Args:
        history: the raw units, whatever earlier turns were shown: the only earlier output of a condenser in it is the
            last note.
        last: the last act turn; None before the first, and after the environment rewrote the history.
        draw: in [0, 1), of the problem: selects a point in the jitter of the trigger.
        write: samples a text for the condenser; None: it may not ask.
        writes: how many texts it may ask for; each adds ``turn_seconds`` to its time limit.
        texts: those that ``write`` has sampled. A used one is a turn, so the view after it is always declared.
        rewritten: what the environment made of ``history``, which then has every unit of the episode.
    """
    most = engine.limits.max_context_tokens
    threshold = engine.trigger.threshold_tokens(most, draw)
    if last is None and rewritten is None:
        check_pinned(engine.renderer, history.pinned, engine.limits)
        return NextView(view=_rendered(engine, history.pinned, ()), history=history)
    raw, every_turn = history, engine.trigger.when == "every_turn"
    if last is not None:
        unchanged, condenses = (*last.view.units, last.unit), True
        continued = None if every_turn else _continued(engine, history, last)
        if continued is not None and len(continued.ids) <= threshold:
            return NextView(view=continued, history=history)
    else:
        assert rewritten is not None
        history, unchanged = rewritten.history, rewritten.history.units
        over_threshold = every_turn or engine.renderer.count(history.messages) > threshold
        continued, condenses = None, bool(unchanged) and over_threshold
    pinned_tokens = engine.renderer.count(history.pinned)
    target = engine.trigger.target_tokens(most, draw)
    budget = Budget(
        tokens=max(target - pinned_tokens, 0),
        prompt_tokens=target,
        scorers=engine.scorers,
        write=write,
        reply_tokens=engine.limits.max_output_tokens,
        seconds=engine.limits.turn_seconds * (1 + writes),
        media=None if engine.renderer.pictures is None else engine.renderer.pictures.media,
    )
    condensed, earlier, past, view = Condensed(units=unchanged), None, history, None
    for _ in range(1 + REPEATS):
        if condenses:
            past, answer = history, await _condense(engine, history, budget)
            condensed = answer if earlier is None else _joined(condensed, answer)
            history = _remembering(history, answer)
            if condensed.note is None:
                history = replace(history, note=raw.note if rewritten is None else rewritten.history.note)
        units = _with_question(history, condensed.units)
        written = condensed.note is not None or len(texts) > len(condensed.rejected)
        if last is not None and units == unchanged and not written:
            continued = continued or _continued(engine, history, last)
            if len(continued.ids) <= most:
                return NextView(view=continued, history=history, rejected=condensed.rejected)
        if view is None or units != earlier:
            view = _rendered(engine, history.pinned, units)
        if condensed.note is not None and history.note is condensed.note:
            units, history = _measured(history, units, len(view.ids) - pinned_tokens)
            now, before = (sum(unit.tokens for unit in each) for each in (units, past.current_units))
            if now >= before and budget.write is not None:
                longer = f"it is not shorter than what it replaces: {now} tokens after, {before} before"
                condensed = replace(condensed, note=None, rejected=(*condensed.rejected, longer))
                earlier, history, budget = units, past, replace(budget, write=None)
                continue
        over = len(view.ids) - target
        if over <= 0 or not condenses:
            break
        earlier, budget = units, replace(budget, tokens=max(budget.tokens - over, 0), write=None)
    assert view is not None
    if len(view.ids) > most:
        raise ContextOverflow.at(turn=len(history.units), tokens=len(view.ids), budget=most)
    name, reason = engine.condenser_name, condensed.reason
    if rewritten is not None:
        changed = units != unchanged
        reason = f"{rewritten.reason}; {name}: {reason}" if changed else rewritten.reason
        name, pinned_tokens = rewritten.by, engine.renderer.count(raw.pinned)
    view = replace(view, units=units)
    declared = _declared(replace(raw, note=history.note), units, view.ids, pinned_tokens, name, reason)
    return NextView(view=replace(view, condensation=declared), history=history, rejected=condensed.rejected)


def request_view(engine: Engine, history: History, last: AnsweredView | None, request: Request) -> View:
    """The view of a condense turn: the last one continued by ids if the request shows it and the newest unit."""
    newest, shown = history.units[-1], tuple(request.units)
    _check_units(history.units, shown)
    most = engine.limits.max_context_tokens
    if last is not None and shown == (*last.view.units, newest):
        continued = _continued(engine, history, last, newest=newest.with_instruction(request.instruction))
        if len(continued.ids) <= most:
            return continued
    *before, latest = shown
    view = _rendered(engine, history.pinned, (*before, latest.with_instruction(request.instruction)))
    if len(view.ids) > most:
        raise SummaryRefused(f"the request has {len(view.ids)} tokens, and {most} are allowed")
    pinned_tokens, name = engine.renderer.count(history.pinned), engine.condenser_name
    declared = _declared(history, shown, view.ids, pinned_tokens, name, "to ask for a text")
    return replace(view, condensation=declared)


def _continued(engine: Engine, history: History, last: AnsweredView, *, newest: Unit | None = None) -> View:
    """The last view, its reply and the results: by ids, or rendered and declared if the template rewrites replies."""
    unit, added = last.unit, last.added_ids
    if newest is not None:  # with an instruction
        unit = newest
        given = last.view.context, unit.reply, unit.results, last.output_ids, last.view.ids
        added = tuple(engine.renderer.continuation(*given))
    units = shared(last.view.units).extended((unit,))
    context = shared(last.view.context).extended(unit.messages)
    if last.whole:
        ids = shared_ids(last.view.ids).extended((*last.output_ids, *added))
        media = (*last.view.media, *_media(engine, unit.messages))
        return View(ids=ids, context=context, units=units, media=media)
    view = _rendered(engine, context, units, flat=True)
    declared = Condensation(
        condenser=CHAT_TEMPLATE,
        reason="the chat template renders earlier replies differently from how they were sampled (strips reasoning)",
        tokens_before=len(last.view.ids) + len(last.output_ids) + len(added),
        tokens_after=len(view.ids),
        spans=condensation_spans(history, (*last.view.units, history.units[-1])),
    )
    return replace(view, condensation=declared)


def _rendered(engine: Engine, messages: Sequence[Message], units: Sequence[Unit], *, flat: bool = False) -> View:
    """A view of pinned messages and units; ``flat``: the messages of the units are among the messages."""
    context = shared(messages if flat else flatten(messages, units))
    ids = shared_ids(engine.renderer.prompt(context))
    return View(ids=ids, context=context, units=units, media=_media(engine, context))


def _declared(
    history: History, units: Sequence[Unit], ids: Sequence[int], pinned_tokens: int, name: str, reason: str
) -> Condensation:
    """The declaration that the units of a history were rewritten."""
    covered = -1 if history.note is None or history.note not in units[:1] else history.note.turn
    shown = [unit for unit in units if unit.is_note or unit.turn > covered]  # a question under the note stays, too
    spans = condensation_spans(history, shown)
    return Condensation(
        condenser=name,
        reason=reason,
        tokens_before=pinned_tokens + sum(span.tokens for span in spans),
        tokens_after=len(ids),
        spans=spans,
    )


def _media(engine: Engine, messages: Sequence[Message]) -> tuple[str, ...]:
    """The hashes of the pictures that a prompt shows."""
    if engine.renderer.pictures is None:  # it would have refused them
        return ()
    return tuple(part.sha256 for message in messages for part in message.media)


def _with_question(history: History, shown: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """The shown units and the newest question, whatever the condenser made of the unit that ends in it."""
    question = history.question
    if question is None or question in shown:
        return shown
    rest = [unit for unit in shown if unit.turn != question.turn or unit.is_note]
    place = next((i for i, unit in enumerate(rest) if unit.turn > question.turn and not unit.is_note), len(rest))
    return (*rest[:place], question, *rest[place:])


def _remembering(history: History, condensed: Condensed) -> History:
    """The history with the new note and captions of a condenser."""
    history = history.with_captions(condensed.captions)
    return history if condensed.note is None else replace(history, note=condensed.note)


async def _condense(engine: Engine, history: History, budget: Budget) -> Condensed:
    """Call the condenser and check its answer."""
    who = f"the condenser {engine.condenser_name!r}"
    async with Boundary(who, seconds=budget.seconds, plugin=engine.condenser):
        with engine.stopwatch:
            answer: object = engine.condenser.condense(history, budget)
            condensed = await answer if isinstance(answer, Awaitable) else answer
        if not isinstance(condensed, Condensed):
            raise TypeError(
                f"condense() returned {condensed!r:.80}, wanted a Condensed, as in return Condensed(units=units)"
            )
        condensed = replace(condensed, units=tuple(condensed.units))  # a list may change later
        _check_units(history.units, condensed.units)
        _check_note(history.units, condensed)
    return condensed


def _measured(history: History, units: tuple[Unit, ...], tokens: int) -> tuple[tuple[Unit, ...], History]:
    """Units and history with the tokens of a new note, if those of all other units are known."""
    note, known = history.note, {id(unit) for unit in history.units}
    others = [unit for unit in units if unit is not note]
    if note is None or len(others) != len(units) - 1 or any(id(unit) not in known for unit in others):
        return units, history
    measured = replace(note, tokens=max(tokens - sum(unit.tokens for unit in others), 1))
    return tuple(measured if unit is note else unit for unit in units), replace(history, note=measured)


def _joined(earlier: Condensed, later: Condensed) -> Condensed:
    """The answer of a repeated call, with what the call before wrote."""
    rejected, note = (*earlier.rejected, *later.rejected), later.note
    if note is None and earlier.note is not None:
        note = earlier.note if earlier.note in later.units else None
        rejected += () if note is not None else ("with it the prompt is over budget",)
    reason = "; ".join(dict.fromkeys(each for each in (earlier.reason, later.reason) if each))
    return replace(later, reason=reason, note=note, captions=(*earlier.captions, *later.captions), rejected=rejected)


def _check_note(units: Sequence[Unit], condensed: Condensed) -> None:
    """Check that a new note is shown and does not cover the newest unit."""
    note = condensed.note
    if note is None:
        return
    if note not in condensed.units:
        raise ValueError(f"its note on the turns up to {note.turn} is not among its units")
    if note.turn >= units[-1].turn:
        raise ValueError(f"its note covers all units, wanted the newest unit, of turn {units[-1].turn}, to stay")


def _check_units(units: tuple[Unit, ...], shown: tuple[Unit, ...]) -> None:
    """Check that the shown units are of the history, each at most once and in order, rewritten or not."""
    if shown == units[len(units) - len(shown) :]:
        return
    if wrong := [unit for unit in shown if not isinstance(unit, Unit)]:
        raise TypeError(f"condense() returned {wrong[0]!r:.80} among its units, wanted those of history.units")
    for unit, index in zip(shown, unit_positions(units, shown), strict=True):
        if unit is not units[index]:
            _check_whole(unit, units[index])


def _check_whole(shown: Unit, raw: Unit) -> None:
    """Check that a shown unit is a reply with its results: no tool result without its call.

    A malformed call has a result too, but is in the text of its reply only.
    """
    if shown.reply.role != "assistant":
        raise ValueError(f"it shows the unit of turn {shown.turn} with a reply of role {shown.reply.role!r}")
    answers = [message.tool_call_id for message in shown.results if message.tool_call_id is not None]
    if not answers:
        return
    made = {call.id for call in shown.reply.tool_calls}
    if shown.reply == raw.reply:
        made |= {message.tool_call_id for message in raw.results if message.tool_call_id is not None}
    orphans = [call for call in answers if call not in made]
    if orphans:
        raise ValueError(
            f"it shows the unit of turn {shown.turn} with results of the calls {orphans}, which its reply does not make"
        )
