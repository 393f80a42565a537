"""One trajectory on a terminal: the condensation at a glance, then turn by turn."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from condensegrpo.core.messages import Message
from condensegrpo.core.trajectory import Condensation, SpanStatus
from condensegrpo.core.wording import counted, ranges
from condensegrpo.display import context_bar, theme
from condensegrpo.display.inspect_tables import verdict
from condensegrpo.display.neutral import excerpt, one_line
from condensegrpo.display.pictures import TerminalPicture
from condensegrpo.display.token_view import token_grid
from condensegrpo.inspection.context_view import newest_messages
from condensegrpo.inspection.panes import TurnView
from condensegrpo.inspection.records import IndexedTrajectory
from condensegrpo.storage.media import MediaFolder

KNOWN_WIDTH = 12  # columns of the bar of what a context knows of the answer
EXCERPT = 600  # characters of a text without --full
REASON = 300  # characters of why a condenser did what it did


def heading(sibling: IndexedTrajectory, detail: str, *, full: bool) -> Text:
    """Its id, question, ground truth, answer, score with its parts, and why it ended."""
    size, figures = 10**9 if full else EXCERPT // 2, sibling.figures
    answer = f"answered {one_line(sibling.answer, 40)!r}" if sibling.answer is not None else "no answer"
    text = Text.assemble((one_line(figures.id, 80), "bold"), "   ", verdict(figures))
    text.append(f"   score {figures.total:.4g}   {answer}\n")
    truth = sibling.ground_truth
    if truth is None and sibling.question is not None:
        truth = "none in text: the environment or the reward judges"
    for name, known in (("problem", figures.problem_id), ("question", sibling.question), ("ground truth", truth)):
        if known is not None:
            text.append(f"{name:13}", theme.DIM).append(f"{excerpt(known, characters=size)}\n")
    parts = "   ".join(f"{one_line(name, 40)} {value:.4g}" for name, value in figures.components.items())
    if parts:
        text.append(f"{'reward parts':13}", theme.DIM).append(f"{parts}\n")
    turns, context = counted(figures.turns, "turn"), counted(figures.context_tokens, "token")
    output = counted(figures.output_tokens, "output token")
    text.append(f"stop {figures.stop} · {turns} · largest context {context} · {output} · ", theme.DIM)
    text.append(f"{figures.seconds:.1f} s", theme.DIM)
    handled = _handled(sibling)
    if handled:
        text.append(f"\n{handled}", theme.WARN)
    if detail:
        text.append(f"\n{excerpt(detail, characters=EXCERPT)}", theme.WARN)
    return text


def _handled(sibling: IndexedTrajectory) -> str:
    """Why it does not train normally; empty: it does, or that is not known."""
    stop = sibling.figures.stop
    match sibling.handling:
        case "mask":
            return f"masked: its stop, {stop}, trains nothing, counts in no statistics (algorithm.stops.handling)"
        case "drop":
            return "dropped: no trajectory of its group has an advantage (algorithm.resample_rounds)"
        case "penalise":
            return f"penalised: its stop, {stop}, counts as wrong (algorithm.stops.handling)"
    if sibling.advantages and not any(sibling.advantages):
        return "no signal: it has no advantage at any turn"
    return ""


def overview(turns: Sequence[TurnView]) -> RenderableType:
    """Every turn as one line: what its prompt still shows of the turns before it, and what it is made of."""
    if not turns:
        return Text("no turn was sampled", theme.DIM)
    units, budget = len(turns), turns[0].context.budget
    table = Table(box=None, pad_edge=False, header_style=theme.DIM, padding=(0, 2, 0, 0))
    table.add_column("turn", justify="right", no_wrap=True)
    table.add_column(context_bar.ruler(units), no_wrap=True)
    table.add_column(Text(f"context of {budget} tokens"))
    credited = any(turn.advantage is not None for turn in turns)
    for name in ("tokens", "output", "advantage")[: 2 + credited]:
        table.add_column(name, justify="right", no_wrap=True)
    scale = max((abs(turn.advantage) for turn in turns if turn.advantage is not None), default=0.0)
    known = [turn.answer_logprob for turn in turns if turn.answer_logprob is not None]
    if known:
        table.add_column("log-prob. of answer, nats", no_wrap=True)
    for turn in turns:
        context = turn.context
        table.add_row(
            str(turn.turn),
            context_bar.strip(context, units),
            context_bar.FittingBar(context),
            Text.assemble(
                (f"{context.tokens + context.saved} → " if context.saved else "", theme.DIM), str(context.tokens)
            ),
            str(turn.output_tokens),
            *([_advantage(turn, scale)] if credited else []),
            *([_known(turn.answer_logprob, lowest=min(known))] if known else []),
        )
    return Group(table, Text(), context_bar.legend(budget))


def details(turns: Sequence[TurnView], *, full: bool, media: MediaFolder | None = None) -> Iterator[RenderableType]:
    """Every turn with its context, reply, calls, results and credit; ``media``: of its pictures, None: not drawn."""
    scale = max((abs(turn.advantage) for turn in turns if turn.advantage is not None), default=0.0)
    for turn in turns:
        yield Text()
        yield Rule(_title(turn), align="left", style=theme.FREE)
        rows = Table.grid(padding=(0, 2, 0, 0))
        rows.add_column(style=theme.DIM, no_wrap=True, min_width=9)
        rows.add_column(overflow="fold")
        for label, shown in _rows(turn, scale, full=full, media=media):
            rows.add_row(Text(label), shown)
        yield Padding(rows, (0, 0, 0, 2))
        if turn.tokens is not None:
            yield Padding(token_grid(turn, scale), (1, 0, 0, 2))


def _title(turn: TurnView) -> Text:
    text = Text.assemble((f"turn {turn.turn}", "bold"))
    if turn.kind != "act":
        text.append(f" {turn.kind}{' by the initial policy' if turn.frozen else ''}", theme.REWRITTEN)
    if turn.condensation is not None:
        text.append(f"   condensed by {one_line(turn.condensation.condenser, 30)}", theme.REWRITTEN)
        text.append(f"   {turn.condensation.tokens_before} → {turn.condensation.tokens_after} tokens")
    return text


def _rows(
    turn: TurnView, scale: float, *, full: bool, media: MediaFolder | None
) -> Iterator[tuple[str, RenderableType]]:
    size = 10**9 if full else EXCERPT
    yield "context", Text.assemble(context_bar.bar(turn.context), "  ", _make_up(turn))
    if turn.condensation is not None:
        yield "units", _spans(turn.condensation)
        yield "why", Text(one_line(turn.condensation.reason, REASON) or "not stated", theme.DIM)
    for text in turn.rejected:
        label = Text(f"{text.tokens} tokens, rejected: {one_line(text.reason, 90)}: ", theme.WARN)
        yield "wrote", label.append(excerpt(text.text, characters=size), theme.DIM)
    messages = turn.messages if full or turn.turn == 0 else newest_messages(turn.messages)
    for message in messages:
        yield from _message("sees", message, size, media)
    if turn.draft is not None:
        probability = f"of probability {turn.draft.probability:.3f}, {turn.draft.tokens} tokens: "
        yield "draft", Text(probability, theme.DIM).append(one_line(turn.draft.text, 90))
    yield "reply", Text(excerpt(turn.reply, characters=size), "bold")
    for call in turn.calls:
        yield "call", Text(excerpt(f"{call.name}({call.arguments})", characters=size), theme.HEAD)
    if turn.tool_attempts:
        taken = "" if turn.tool_seconds is None else f" in {turn.tool_seconds:.2f} s"
        yield "tools", Text(f"{turn.tool_successes} of {counted(turn.tool_attempts, 'call')} succeeded{taken}")
    for message in turn.observations:
        yield from _message("then", message, size, media)
    for name, value in turn.turn_rewards.items():
        yield "reward", Text(f"{one_line(name, 40)} {value:.4g}")
    if turn.paid is not None:
        yield "reward", Text(f"of the turn {turn.paid:.4g}")
    yield "sampled" if turn.advantage is None else "trained", _credit(turn, scale)


def _message(when: str, message: Message, size: int, media: MediaFolder | None) -> Iterator[tuple[str, RenderableType]]:
    speaker = one_line(message.name, 24) if message.name else message.role
    yield f"{when} {speaker}", Text(excerpt(message.text, characters=size))
    if media is not None:
        yield from (("", TerminalPicture(media, part.sha256)) for part in message.media)


def _make_up(turn: TurnView) -> Text:
    text = Text()
    for mark, tokens in context_bar.parts(turn.context):
        if tokens:
            text.append(f"{mark.word.split()[0]} ", theme.DIM).append(f"{tokens}  ", mark.style)
    return text


def _spans(declared: Condensation) -> Text:
    text = Text()
    for status in (SpanStatus.KEPT, SpanStatus.REWRITTEN, SpanStatus.DROPPED):
        spans = [span for span in declared.spans if span.status is status]
        if spans:
            mark = context_bar.STATUS_MARKS[status]
            names = ranges([turn for span in spans for turn in span.turns])
            text.append(f"{mark.glyph} {mark.word} ", mark.style)
            turns = f"turn {names}" if sum(span.units for span in spans) == 1 else f"turns {names}"
            text.append(f"{turns}, {sum(span.tokens for span in spans)} tokens   ")
    return text


def _credit(turn: TurnView, scale: float) -> Text:
    text = Text(counted(turn.output_tokens, "token"))
    if turn.logprob is not None:
        text.append(f"   mean log-probability {turn.logprob:.3f}", theme.DIM)
    if turn.advantage is not None:
        text.append("   advantage ", theme.DIM).append(
            f"{turn.advantage:+.3f}", theme.signed_style(turn.advantage, scale)
        )
    if turn.weight is not None:
        note = f"   weight {turn.weight:.3g} a token" if turn.weight else "   weight 0: not trained"
        text.append(note, theme.DIM)
    if turn.policy_version is not None:
        text.append(f"   policy after {counted(turn.policy_version, 'step')}", theme.DIM)
    return text


def _known(nats: float | None, *, lowest: float) -> Text:
    """What a context knows of the answer, with a bar: empty at the least that any context of the episode knows."""
    if nats is None:
        return Text("–", theme.DIM)
    filled = KNOWN_WIDTH if lowest == 0 else round(KNOWN_WIDTH * (1 - nats / lowest))
    return Text.assemble(f"{nats:6.1f} ".replace("-", "−"), ("▬" * filled, theme.HEAD))


def _advantage(turn: TurnView, scale: float) -> Text:
    if turn.advantage is None:
        return Text("–", theme.DIM)
    return Text(f"{turn.advantage:+.2f}", theme.signed_style(turn.advantage, scale))
