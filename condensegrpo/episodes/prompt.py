"""The prompt of the next turn: the last one continued by token ids, or a fresh render that is declared as condensation.

    turn 0   pinned                                        rendered
    turn 1   pinned u0                                     turn 0's prompt + its output + what came back: by ids
    turn 2   pinned [turn 0 …] u1                          u0 was dropped: rendered, Condensation(tokens 90 → 55)
    turn 3   pinned [turn 0 …] u1 u2                       nothing new was dropped: turn 2 continued by ids, undeclared

Sampled tokens are never tokenised again to continue a prompt: a prompt that does not continue by ids is declared.
"""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace

from condensegrpo.core.errors import ContextOverflow
from condensegrpo.core.messages import History, Message, Unit, flatten
from condensegrpo.core.protocols.condenser import (
    Budget,
    Condensed,
    Request,
    WriteSummary,
    condensation_spans,
    unit_positions,
    unit_tokens,
)
from condensegrpo.core.protocols.environment import RewrittenHistory
from condensegrpo.core.shared_sequence import shared, shared_ids
from condensegrpo.core.trajectory import Condensation, Span
from condensegrpo.episodes.boundary import Boundary
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.render import Renderer
from condensegrpo.episodes.sampling import Prompt, Sampled
from condensegrpo.episodes.settings import Limits

CHAT_TEMPLATE = "chat_template"  # the condenser's name where only the template rewrote something


@dataclass(frozen=True, slots=True, kw_only=True)
class NextPrompt:
    """The prompt of the next turn, with the condenser's summary and rejections."""

    prompt: Prompt
    history: History  # with the condenser's summary, if it made one
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


async def next_prompt(
    engine: Engine,
    history: History,
    last: Sampled | None,
    *,
    draw: float,
    write: WriteSummary | None = None,
    writes: int = 0,
    texts: Sequence[Sampled] = (),
    rewritten: RewrittenHistory | None = None,
) -> NextPrompt:
    """The prompt of the turn that follows ``history``, of at most ``max_context_tokens``.

    Args:
        history: the raw units, whatever earlier turns were shown: the only earlier output of a condenser in it is the
            last summary.
        last: the last act turn; None before the first, and after the environment rewrote the history.
        draw: in [0, 1), of the problem: selects a point in the jitter of the trigger.
        write: samples a text for the condenser; None: it may not ask.
        writes: how many texts it may ask for; each adds ``turn_seconds`` to its time limit.
        texts: those that ``write`` has sampled. A used one is a turn, so the prompt after it is always declared.
        rewritten: what the environment made of ``history``, which then has every unit of the episode.
    """
    most = engine.limits.max_context_tokens
    budget = Budget(
        tokens=engine.trigger.target_tokens(most, draw),
        count=engine.renderer.count,
        scorers=engine.scorers,
        write=write,
        request_tokens=most,
        reply_tokens=engine.limits.max_output_tokens,
        seconds=engine.limits.turn_seconds * (1 + writes),
        media=None if engine.renderer.pictures is None else engine.renderer.pictures.media,
    )
    if rewritten is not None:
        return await _after_rewriting(engine, history, rewritten, budget, engine.trigger.threshold_tokens(most, draw))
    if last is None:
        check_pinned(engine.renderer, history.pinned, engine.limits)
        first = Prompt(
            ids=shared_ids(engine.renderer.prompt(history.pinned)),
            context=shared(history.pinned),
            media=_media(engine, history.pinned),
        )
        return NextPrompt(prompt=first, history=history)
    continued = None
    if engine.trigger.when == "over_budget":
        continued = _continued(engine, history, last)
        if len(continued.ids) <= engine.trigger.threshold_tokens(most, draw):
            return NextPrompt(prompt=continued, history=history)
    history = replace(history, tokens=unit_tokens(history, engine.renderer.count))
    condensed = await _condense(engine, history, budget)
    unchanged = condensed.summary is None and condensed.units == (*last.prompt.units, history.units[-1])
    history = _remembering(history, condensed)
    if unchanged and len(texts) == len(condensed.rejected):
        continued = continued or _continued(engine, history, last)
        if len(continued.ids) <= most:
            return NextPrompt(prompt=continued, history=history, rejected=condensed.rejected)
    spans = condensation_spans(history, condensed.units, engine.renderer.count)
    prompt = _rewritten(engine, history, condensed.units, spans, reason=condensed.reason)
    return NextPrompt(prompt=prompt, history=history, rejected=condensed.rejected)


async def _after_rewriting(
    engine: Engine, raw: History, rewritten: RewrittenHistory, budget: Budget, most: int
) -> NextPrompt:
    """The prompt of a history that the environment rewrote; the condenser is called as it would be for any other.

    Args:
        raw: every unit of the episode, with the pinned messages before.
        most: tokens, from which on ``over_budget`` condenses.
    """
    history, reason = rewritten.history, rewritten.reason
    units, rejected = history.units, tuple[str, ...]()
    if units and (engine.trigger.when == "every_turn" or engine.renderer.count(history.messages) > most):
        history = replace(history, tokens=unit_tokens(history, engine.renderer.count))
        condensed = await _condense(engine, history, budget)
        rejected = condensed.rejected
        history = _remembering(history, condensed)
        if condensed.units != units:
            units, reason = condensed.units, f"{reason}; {engine.condenser_name}: {condensed.reason}"
    spans = condensation_spans(replace(raw, summary=history.summary), units, engine.renderer.count)
    declared = replace(engine, condenser_name=rewritten.by)
    prompt = _rewritten(declared, history, units, spans, reason=reason, pinned=raw.pinned)
    return NextPrompt(prompt=prompt, history=history, rejected=rejected)


def request_prompt(engine: Engine, history: History, last: Sampled | None, request: Request) -> Prompt:
    """The prompt of a condense turn: the last prompt continued by ids if the request shows it and the newest unit."""
    newest, shown = history.units[-1], tuple(request.units)
    _check_units(history.units, shown)
    if last is not None and shown == (*last.prompt.units, newest):
        continued = _continued(engine, history, last, newest=newest.with_instruction(request.instruction))
        if len(continued.ids) <= engine.limits.max_context_tokens:
            return replace(continued, request=request)
    *before, latest = shown
    spans = condensation_spans(history, shown, engine.renderer.count)
    requested = (*before, latest.with_instruction(request.instruction))
    return replace(_rewritten(engine, history, requested, spans, reason="to ask for a text"), request=request)


def _continued(engine: Engine, history: History, last: Sampled, *, newest: Unit | None = None) -> Prompt:
    """The last prompt, its reply and the results: by ids, or rendered and declared if the template rewrites replies."""
    newest = newest or history.units[-1]  # given: with an instruction
    units = shared(last.prompt.units).extended((newest,))
    context = shared(last.prompt.context).extended(newest.messages)
    added = engine.renderer.continuation(
        last.prompt.context, newest.reply, newest.results, last.generation.token_ids, last.prompt.ids
    )
    continued = shared_ids(last.prompt.ids).extended((*last.generation.token_ids, *added))
    if engine.renderer.keeps_replies(context):
        media = (*last.prompt.media, *_media(engine, newest.messages))
        return Prompt(ids=continued, context=context, units=units, media=media)
    ids = shared_ids(engine.renderer.prompt(context))
    declared = Condensation(
        condenser=CHAT_TEMPLATE,
        reason="the chat template renders earlier replies differently from how they were sampled (strips reasoning)",
        tokens_before=len(continued),
        tokens_after=len(ids),
        spans=condensation_spans(history, (*last.prompt.units, history.units[-1]), engine.renderer.count),
    )
    media = _media(engine, context)
    return Prompt(ids=ids, context=context, units=units, condensation=declared, media=media)


def _rewritten(
    engine: Engine,
    history: History,
    units: tuple[Unit, ...],
    spans: tuple[Span, ...],
    *,
    reason: str,
    pinned: Sequence[Message] | None = None,
) -> Prompt:
    """The prompt of the units that the condenser returned, rendered and declared; ``pinned`` are those before it."""
    context = shared(flatten(history.pinned, units))
    ids = shared_ids(engine.renderer.prompt(context))
    budget = engine.limits.max_context_tokens
    if len(ids) > budget:
        raise ContextOverflow.at(turn=len(history.units), tokens=len(ids), budget=budget)
    # not count(history.messages): that would render the whole episode in every turn
    tokens_before = engine.renderer.count(history.pinned if pinned is None else pinned) + sum(
        span.tokens for span in spans
    )
    declared = Condensation(
        condenser=engine.condenser_name,
        reason=reason,
        tokens_before=tokens_before,
        tokens_after=len(ids),
        spans=spans,
    )
    return Prompt(ids=ids, context=context, units=units, condensation=declared, media=_media(engine, context))


def _media(engine: Engine, messages: Sequence[Message]) -> tuple[str, ...]:
    """The hashes of the pictures that a prompt shows."""
    if engine.renderer.pictures is None:  # it would have refused them
        return ()
    return tuple(part.sha256 for message in messages for part in message.media)


def _remembering(history: History, condensed: Condensed) -> History:
    """The history with the new summary and captions of a condenser."""
    history = history.with_captions(condensed.captions)
    return history if condensed.summary is None else history.with_summary(condensed.summary)


async def _condense(engine: Engine, history: History, budget: Budget) -> Condensed:
    """Call the condenser and check its answer."""
    who = f"the condenser {engine.condenser_name!r}"
    async with Boundary(who, seconds=budget.seconds, plugin=engine.condenser):
        with engine.stopwatch:
            answer: object = engine.condenser.condense(history, budget, engine.toolbox.schemas)
            condensed = await answer if isinstance(answer, Awaitable) else answer
        if not isinstance(condensed, Condensed):
            raise TypeError(
                f"condense() returned {condensed!r:.80}, wanted a Condensed, as in return Condensed(units=units)"
            )
        condensed = replace(condensed, units=tuple(condensed.units))  # a list may change later
        _check_units(history.units, condensed.units)
        _check_summary(history.units, condensed)
    return condensed


def _check_summary(units: Sequence[Unit], condensed: Condensed) -> None:
    """Check that a new summary is shown and does not cover the newest unit."""
    summary = condensed.summary
    if summary is None:
        return
    if summary.unit not in condensed.units:
        raise ValueError(f"its summary of the turns up to {summary.through} is not among its units")
    if summary.through >= units[-1].turn:
        raise ValueError(f"its summary covers all units, wanted the newest unit, of turn {units[-1].turn}, to stay")


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
