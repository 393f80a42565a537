"""The view of the next turn: when a condenser is called, within which budget, and the prompt that its answer makes."""

from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import NamedTuple

from condensegrpo.core.condenser import Budget, Condensed, Request, WrittenSummary
from condensegrpo.core.errors import ContextOverflow
from condensegrpo.core.messages import History, Unit
from condensegrpo.core.protocols.environment import RewrittenHistory
from condensegrpo.core.trajectory import StopReason
from condensegrpo.episodes.boundary import Boundary, EndEpisode
from condensegrpo.episodes.conversation import Conversation, WrittenText
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.sampling import sample
from condensegrpo.episodes.view import AnsweredView, View, check_pinned, continued, declared, rendered, request_view

REPEATS = 3  # calls of a condenser that follow one whose units were over budget as a prompt
USER_SHARE = 0.5  # of the units' budget that earlier messages of the user may take beside what a condenser shows


class SummaryWriter:
    """Samples condense turns for one call of a condenser: a used text is a turn, a rejected one is not trained.

    turn 4   act        pinned u0 u1 u2 u3              → reply, which becomes u4
    turn 5   condense   pinned u0 u1 u2 u3 u4 "sum up"  → S       turn 4 continued by ids: same system prompt, tools
    turn 6   act        pinned [S] u4                   → reply   declared condensation
    """

    def __init__(self, conversation: Conversation, history: History) -> None:
        """``history``: that the condenser is given."""
        self._conversation, self._history = conversation, history
        self.texts: list[WrittenText] = []

    def check(self, rejected: Sequence[str]) -> None:
        """Check that at most one of the texts was not rejected."""
        if len(self.texts) - len(rejected) not in (0, 1):
            raise EndEpisode(
                StopReason.ENVIRONMENT_ERROR,
                f"the condenser {self._conversation.engine.condenser_name!r} asked for {len(self.texts)} texts and "
                f"rejected {len(rejected)}, wanted all rejected but the last, or all (Condensed.rejected)",
            )

    async def write(self, request: Request) -> WrittenSummary:
        """Sample the text of a request."""
        conversation, room = self._conversation, self._conversation.engine.limits.max_output_tokens
        if len(self.texts) == conversation.max_texts:
            raise RuntimeError(
                f"it asks for more texts than the {conversation.max_texts} that its property writes allows"
            )
        view = request_view(conversation.engine, self._history, conversation.last, request)
        output = await sample(
            conversation,
            view,
            seed=conversation.next_seed(),
            max_tokens=room if request.max_tokens is None else min(room, request.max_tokens),
            request=request,  # and no stop strings of tool calls, which would end a summary that quotes a call
        )
        self.texts.append(WrittenText(view, output))
        return WrittenSummary(text=output.reply.message.text, finish=output.finish, tokens=len(output.token_ids))


class Condensing(NamedTuple):
    """A prompt that a condenser shortened."""

    view: View
    history: History  # with the condenser's note and captions, if it made some
    answer: Condensed
    continues: bool = False  # the last view by ids: nothing is to be declared


# the view of the next turn, the history with what the condenser made, and why it rejected texts
NextView = tuple[View, History, tuple[str, ...]]


async def next_view(conversation: Conversation) -> View:
    """The view of the next turn, of at most ``max_context_tokens``; texts that were written for it are recorded.

    The condenser sees the raw units, whatever earlier turns were shown: the only earlier output of a condenser in the
    history is the last note.
    """
    history, rewritten = conversation.history, conversation.rewritten
    writer = SummaryWriter(conversation, history if rewritten is None else rewritten.history)
    rejected: tuple[str, ...] = ()
    try:
        with Boundary("rendering the prompt"):
            view, conversation.history, rejected = await _next_view(conversation, writer)
        writer.check(rejected)
    except EndEpisode as end:
        conversation.add_texts(writer.texts, [f"the episode ended: {end.detail}"] * len(writer.texts))
        raise
    conversation.add_texts(writer.texts, rejected)
    return view


async def _next_view(conversation: Conversation, writer: SummaryWriter) -> NextView:
    if conversation.last is not None:
        return await _view_after(conversation, conversation.last, writer)
    if conversation.rewritten is not None:
        return await _view_of_rewritten(conversation, conversation.rewritten, writer)
    engine, history = conversation.engine, conversation.history
    check_pinned(engine.renderer, history.pinned, engine.limits)
    return rendered(engine, history.pinned), history, ()


async def _view_after(conversation: Conversation, last: AnsweredView, writer: SummaryWriter) -> NextView:
    """The last view continued, or condensed if that is due."""
    engine, history, continuing = conversation.engine, conversation.history, None
    if engine.condense.when != "every_turn":
        continuing = continued(engine, history, last)
        if len(continuing.ids) <= _threshold(conversation):
            return continuing, history, ()
    made = await _condensing(conversation, history, (*last.view.units, last.unit), continuing, writer)
    return _declared(conversation, made, made.answer.reason)


async def _view_of_rewritten(
    conversation: Conversation, rewritten: RewrittenHistory, writer: SummaryWriter
) -> NextView:
    """The view of a history that the environment rewrote, condensed if that is due."""
    engine, start, units = conversation.engine, rewritten.history, rewritten.history.units
    every_turn = engine.condense.when == "every_turn"
    if units and (every_turn or engine.renderer.count(start.messages) > _threshold(conversation)):
        made = await _condensing(conversation, start, units, None, writer)
    else:
        shown = with_messages_of_user(start, units, room=0)
        made = Condensing(rendered(engine, start.pinned, shown), start, Condensed(units=shown))
    reason = rewritten.reason
    if made.view.units != units:
        reason = f"{reason}; {engine.condenser_name}: {made.answer.reason}"
    return _declared(conversation, made, reason, by=rewritten.by)


def _threshold(conversation: Conversation) -> int:
    engine = conversation.engine
    return engine.condense.threshold_tokens(engine.limits.max_context_tokens, conversation.draw)


def _declared(conversation: Conversation, made: Condensing, reason: str, *, by: str = "") -> NextView:
    """A shortened prompt, declared unless it continues the last view; ``by``: as of ``declared``."""
    engine, view, most = conversation.engine, made.view, conversation.engine.limits.max_context_tokens
    if not made.continues:
        if len(view.ids) > most:
            raise ContextOverflow.at(turn=len(made.history.units), tokens=len(view.ids), budget=most)
        view = declared(engine, conversation.history.with_note(made.history.note), view, reason, by=by)
    return view, made.history, made.answer.rejected


async def _condensing(
    conversation: Conversation,
    start: History,
    unchanged: tuple[Unit, ...],
    continuing: View | None,
    writer: SummaryWriter,
) -> Condensing:
    """Call the condenser until its units fit as a prompt, at most 1 + ``REPEATS`` times.

    Args:
        start: the history that it is given.
        unchanged: the units of a prompt that goes on where the last one ended.
        continuing: that prompt, if it is known.
        writer: of texts that the condenser may ask for, in the first call only.
    """
    engine, last, history, view = conversation.engine, conversation.last, start, None
    pinned = engine.renderer.count(start.pinned)
    first = budget = _budget(conversation, start, pinned, writer)
    condensed: Condensed | None = None
    shown: tuple[Unit, ...] | None = None  # units of ``view``
    for call in range(1 + REPEATS):
        past, answer = history, await _condense(engine, history, budget)
        if condensed is None:
            condensed = answer
        else:
            condensed = _joined(condensed, answer, wrote=len(writer.texts) > len(condensed.rejected))
        note = answer.note or (start.note if condensed.note is None else history.note)
        history = history.with_captions(answer.captions).with_note(note)
        # after the last call only the condenser's units are shown
        room = 0 if call == REPEATS else int(USER_SHARE * first.tokens)
        units = with_messages_of_user(history, condensed.units, room=room)
        wrote = condensed.note is not None or len(writer.texts) > len(condensed.rejected)
        if last is not None and units == unchanged and not wrote:  # a used text is a turn: what follows is declared
            continuing = continuing or continued(engine, start, last)
            if len(continuing.ids) <= engine.limits.max_context_tokens:
                return Condensing(continuing, history, condensed, continues=True)
        if view is None or units != shown:
            view = rendered(engine, history.pinned, units)
        if condensed.note is not None and history.note is condensed.note:
            units, history = _measured(history, units, len(view.ids) - pinned)
            longer = _longer(units, with_messages_of_user(past, past.current_units, room=room))
            if longer and budget.write is not None:
                condensed = replace(condensed, note=None, rejected=(*condensed.rejected, longer))
                shown, history, budget = units, past, replace(budget, write=None)
                continue
        over = len(view.ids) - budget.prompt_tokens
        if over <= 0:
            break
        shown, budget = units, replace(budget, tokens=max(budget.tokens - over, 0), write=None)
    assert view is not None
    assert condensed is not None
    return Condensing(view if units is view.units else replace(view, units=units), history, condensed)


def _budget(conversation: Conversation, start: History, pinned: int, writer: SummaryWriter) -> Budget:
    """The budget of the units; ``pinned``: the tokens of the messages before them."""
    engine = conversation.engine
    target = engine.condense.target_tokens(engine.limits.max_context_tokens, conversation.draw)
    return Budget(
        tokens=max(target - pinned, 0),
        prompt_tokens=target,
        scorers=engine.scorers,
        write=writer.write if conversation.max_texts and start.units else None,
        reply_tokens=engine.limits.max_output_tokens,
        seconds=engine.limits.turn_seconds * (1 + conversation.max_texts),
        media=None if engine.renderer.pictures is None else engine.renderer.pictures.media,
    )


async def _condense(engine: Engine, history: History, budget: Budget) -> Condensed:
    """Call the condenser and check its answer."""
    source = f"the condenser {engine.condenser_name!r}"
    async with Boundary(source, seconds=budget.seconds, plugin=engine.condenser):
        with engine.stopwatch:
            answer: object = engine.condenser.condense(history, budget)
            condensed = await answer if isinstance(answer, Awaitable) else answer
        if not isinstance(condensed, Condensed):
            raise TypeError(
                f"condense() returned {condensed!r:.80}, wanted a Condensed, as in return Condensed(units=units)"
            )
        if not isinstance(condensed.units, tuple):  # a list may change later
            condensed = replace(condensed, units=tuple(condensed.units))
        condensed.check(history.units)
    return condensed


def with_messages_of_user(history: History, shown: tuple[Unit, ...], *, room: int) -> tuple[Unit, ...]:
    """The shown units, and those that end in messages of the user, whatever the condenser made of them.

    The newest is always shown, since it is not answered yet; of the earlier ones as many as ``room`` tokens hold, the
    oldest are left out first. A unit is shown with its reply, in order.

        pinned 1, 4 and 7 of units 0 to 9; shown 8 9     ─▶  7 8 9, with room 4 7 8 9, with more room 1 4 7 8 9
    """
    for number, unit in enumerate(unit for unit in reversed(history.units) if unit.pinned):
        if unit in shown:
            continue
        rest = [each for each in shown if each.turn != unit.turn or each.is_note]
        if number:
            room -= unit.tokens - sum(each.tokens for each in shown) + sum(each.tokens for each in rest)
            if room < 0:
                break
        later = (index for index, each in enumerate(rest) if each.turn > unit.turn and not each.is_note)
        index = next(later, len(rest))
        shown = (*rest[:index], unit, *rest[index:])
    return shown


def _measured(history: History, units: tuple[Unit, ...], tokens: int) -> tuple[tuple[Unit, ...], History]:
    """Units and history with the tokens of a new note, if those of all other units are known."""
    note, known = history.note, {id(unit) for unit in history.units}
    others = [unit for unit in units if unit is not note]
    if note is None or len(others) != len(units) - 1 or any(id(unit) not in known for unit in others):
        return units, history
    measured = replace(note, tokens=max(tokens - sum(unit.tokens for unit in others), 1))
    return tuple(measured if unit is note else unit for unit in units), replace(history, note=measured)


def _longer(units: Sequence[Unit], replaced: Sequence[Unit]) -> str:
    """Why a note is refused with which units are shown in place of others; empty: they are shorter."""
    now, before = (sum(unit.tokens for unit in each) for each in (units, replaced))
    return f"it is not shorter than what it replaces: {now} tokens after, {before} before" if now >= before else ""


def _joined(earlier: Condensed, later: Condensed, *, wrote: bool) -> Condensed:
    """The answer of a repeated call, with what the call before wrote; ``wrote``: by the policy, and not rejected."""
    rejected, note = (*earlier.rejected, *later.rejected), later.note
    if note is None and earlier.note is not None:
        note = earlier.note if earlier.note in later.units else None
        rejected += () if note is not None or not wrote else ("with it the prompt is over budget",)
    reason = "; ".join(dict.fromkeys(each for each in (earlier.reason, later.reason) if each))
    return replace(later, reason=reason, note=note, captions=(*earlier.captions, *later.captions), rejected=rejected)
