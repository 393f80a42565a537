"""What the policy is shown: the last prompt continued by token ids, or a fresh render that is declared.

    turn 0   pinned                                        rendered
    turn 1   pinned u0                                     turn 0's prompt + its output + what came back: by ids
    turn 2   pinned [turn 0 …] u1                          u0 was dropped: rendered, Condensation(tokens 90 → 55)
    turn 3   pinned [turn 0 …] u1 u2                       nothing new was dropped: turn 2 continued by ids, undeclared

Sampled tokens are never tokenised again to continue a prompt: a prompt that does not continue by ids is declared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from condensegrpo.core.condenser import Request, check_shown, condensation_spans, with_tokens
from condensegrpo.core.errors import ContextOverflow, SummaryRefused
from condensegrpo.core.messages import History, Message, Unit, flatten
from condensegrpo.core.shared_sequence import SharedSequence, shared, shared_ids
from condensegrpo.core.trajectory import Condensation
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.render import Renderer
from condensegrpo.episodes.settings import Limits

CHAT_TEMPLATE = "chat_template"  # the condenser's name where only the template rewrote something


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A prompt and the messages that it shows."""

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
    context: SharedSequence[Message]  # of the view, and the messages of the unit
    keeps_replies: bool  # False: the chat template renders earlier replies differently from how they were sampled


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
    added = engine.renderer.continuation(view.context, unit.reply, unit.results, output_ids, view.ids)
    context = shared(view.context).extended(unit.messages)
    keeps_replies = engine.renderer.keeps_replies(context)
    if keeps_replies:
        unit = replace(unit, tokens=len(output_ids) + len(added))
    if not unit.tokens or any(message.media for message in unit.results):
        (unit,) = with_tokens(History(pinned=pinned, units=(unit,)), engine.renderer.count).units
    return AnsweredView(
        view=view, output_ids=output_ids, added_ids=added, unit=unit, context=context, keeps_replies=keeps_replies
    )


def rendered(engine: Engine, pinned: Sequence[Message], units: Sequence[Unit] = ()) -> View:
    """A view of pinned messages and units."""
    context = shared(flatten(pinned, units))
    return View(ids=engine.renderer.prompt(pinned, units), context=context, units=units, media=_media(engine, context))


def continued(engine: Engine, history: History, last: AnsweredView, *, newest: Unit | None = None) -> View:
    """The last view, its reply and the results: by ids, or rendered and declared if the template rewrites replies.

    ``newest``: the last unit with an instruction at its end, for a text that a condenser asks for.
    """
    unit, added, context = last.unit, last.added_ids, last.context
    if newest is not None:
        unit = newest
        added = engine.renderer.continuation(
            last.view.context, unit.reply, unit.results, last.output_ids, last.view.ids
        )
        context = shared(last.view.context).extended(unit.messages)
    units = shared(last.view.units).extended((unit,))
    if last.keeps_replies:
        ids = shared_ids(last.view.ids).extended((*last.output_ids, *added))
        media = (*last.view.media, *_media(engine, unit.messages))
        return View(ids=ids, context=context, units=units, media=media)
    view = replace(rendered(engine, context), units=units)
    declaration = Condensation(
        condenser=CHAT_TEMPLATE,
        reason="the chat template renders earlier replies differently from how they were sampled (strips reasoning)",
        tokens_before=len(last.view.ids) + len(last.output_ids) + len(added),
        tokens_after=len(view.ids),
        spans=condensation_spans(history, (*last.view.units, history.units[-1])),
    )
    return replace(view, condensation=declaration)


def declared(engine: Engine, history: History, view: View, reason: str, *, by: str = "") -> View:
    """A view with the declaration that the units of a history were rewritten; ``by``: not by the condenser."""
    counted, covered = list[Unit](), -1
    for unit in view.units:
        if unit.is_note or unit.turn > covered:  # messages of the user stay under a note that covers their units
            counted.append(unit)
        covered = max(covered, unit.turn if unit.is_note else -1)
    spans = condensation_spans(history, counted)
    declaration = Condensation(
        condenser=by or engine.condenser_name,
        reason=reason,
        tokens_before=engine.renderer.count(history.pinned) + sum(span.tokens for span in spans),
        tokens_after=len(view.ids),
        spans=spans,
    )
    return replace(view, condensation=declaration)


def request_view(engine: Engine, history: History, last: AnsweredView | None, request: Request) -> View:
    """The view of a condense turn: the last one continued by ids if the request shows it and the newest unit."""
    newest, shown, most = history.units[-1], tuple(request.units), engine.limits.max_context_tokens
    check_shown(history.units, shown)
    if last is not None and shown == (*last.view.units, newest):
        view = continued(engine, history, last, newest=newest.with_instruction(request.instruction))
        if len(view.ids) <= most:
            return view
    *before, latest = shown
    view = rendered(engine, history.pinned, (*before, latest.with_instruction(request.instruction)))
    if len(view.ids) > most:
        raise SummaryRefused(f"the request has {len(view.ids)} tokens, and {most} are allowed")
    return declared(engine, history, replace(view, units=shown), "to ask for a text")


def _media(engine: Engine, messages: Sequence[Message]) -> tuple[str, ...]:
    """The hashes of the pictures that a prompt shows."""
    if engine.renderer.pictures is None:  # it would have refused them
        return ()
    return tuple(part.sha256 for message in messages for part in message.media)
