"""One trajectory on a terminal: the condensation at a glance, then turn by turn, with its sampled tokens and pictures.

``--tokens`` shows the sampled tokens of a turn as glosses, coloured by their advantage:

<note>     5  </note>    <end>       text
    11    26       12        1       id
 -0.02 -0.11    -0.00    -0.03       log-probability, nats
"""

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from condensegrpo.core.messages import Message
from condensegrpo.core.trajectory import Condensation, SpanStatus
from condensegrpo.core.wording import plural, ranges
from condensegrpo.display import context_bar, theme
from condensegrpo.display.tables import verdict_text
from condensegrpo.display.theme import excerpt, one_line
from condensegrpo.inspection.panes import TokenView, TurnView, newest_messages
from condensegrpo.inspection.pictures import thumbnail
from condensegrpo.inspection.records import IndexedTrajectory
from condensegrpo.storage.media import MediaFolder

KNOWN_WIDTH = 12  # columns of the bar of what a context knows of the answer
EXCERPT = 600  # characters of a text without --full
REASON = 300  # characters of why a condenser did what it did
LONGEST = 24  # characters of one token's text
SURPRISING = -2.0  # nats: less likely than one in seven
COLUMNS = 32  # of a picture


def heading(sibling: IndexedTrajectory, detail: str, *, credit: str, full: bool) -> RenderableType:
    """Its id, question, ground truth, answer, score with its parts, its credit in one sentence, and why it ended."""
    size, figures = 10**9 if full else EXCERPT // 2, sibling.figures
    answer = f"answered {one_line(sibling.answer, 40)!r}" if sibling.answer is not None else "no answer"
    title = Text.assemble((one_line(figures.id, 80), "bold"), "   ", verdict_text(figures))
    title.append(f"   score {figures.total:.4g}   {answer}")
    truth = sibling.ground_truth
    if truth is None and sibling.question is not None:
        truth = "none in text: the environment or the reward judges"
    parts = "   ".join(f"{one_line(name, 40)} {value:.4g}" for name, value in figures.components.items())
    known = Table.grid(padding=(0, 1, 0, 0))
    known.add_column(style=theme.DIM, no_wrap=True, min_width=12)
    known.add_column(overflow="fold")
    for name, text in (
        ("problem", figures.problem_id),
        ("question", sibling.question),
        ("ground truth", truth),
        ("reward parts", parts or None),
        ("credit", credit or None),
    ):
        if text is not None:
            known.add_row(name, Text(excerpt(text, characters=size)))
    ended = (
        f"stop {figures.stop}",
        plural(figures.turns, "turn"),
        f"largest context {plural(figures.context_tokens, 'token')}",
        plural(figures.output_tokens, "output token"),
        f"price {figures.price:.0f}",
        f"{figures.seconds:.1f} s",
    )
    why = [_handled(sibling), excerpt(detail, characters=EXCERPT)]
    return Group(
        title,
        known,
        theme.Flow((Text(part, theme.DIM) for part in ended), gap=" · ", indent=len("stop ")),
        *(Text(line, theme.WARN) for line in why if line),
    )


def _handled(sibling: IndexedTrajectory) -> str:
    """The reason for which it does not train normally; empty if it does, or if that is not known."""
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
    """Every turn as one line: the earlier turns that its prompt still shows, and the make-up of the prompt."""
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
        context, advantage = turn.context, Text("–", theme.DIM)
        if turn.advantage is not None:
            advantage = Text(f"{turn.advantage:+.2f}", theme.signed_style(turn.advantage, scale))
        table.add_row(
            str(turn.turn),
            context_bar.strip(context, units),
            context_bar.FittingBar(context),
            Text.assemble(
                (f"{context.tokens + context.saved} → " if context.saved else "", theme.DIM), str(context.tokens)
            ),
            str(turn.output_tokens),
            *([advantage] if credited else []),
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
        text.append(f" {turn.kind}{' by another writer' if turn.frozen else ''}", theme.REWRITTEN)
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
        yield "tools", Text(f"{turn.tool_successes} of {plural(turn.tool_attempts, 'call')} succeeded{taken}")
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
    text = Text(plural(turn.output_tokens, "token"))
    if turn.logprob:  # 0: written, not sampled
        text.append(f"   mean log-probability {turn.logprob:.3f}", theme.DIM)
    if turn.advantage is not None:
        text.append("   advantage ", theme.DIM).append(
            f"{turn.advantage:+.3f}", theme.signed_style(turn.advantage, scale)
        )
    if turn.weight is not None:
        note = f"   weight {turn.weight:.3g} a token" if turn.weight else "   weight 0: not trained"
        text.append(note, theme.DIM)
    if turn.policy_version is not None:
        text.append(f"   policy after {plural(turn.policy_version, 'step')}", theme.DIM)
    return text


def _known(nats: float | None, *, lowest: float) -> Text:
    """The log-probability of the answer in a context, with a bar that is empty at the lowest of the episode."""
    if nats is None:
        return Text("–", theme.DIM)
    filled = KNOWN_WIDTH if lowest == 0 else round(KNOWN_WIDTH * (1 - nats / lowest))
    return Text.assemble(f"{nats:6.1f} ".replace("-", "−"), ("▬" * filled, theme.HEAD))


class Glosses:
    """Tokens side by side, three lines each, wrapped at the width of the console."""

    def __init__(self, tokens: Sequence[TokenView], style: str) -> None:
        self._tokens = tokens
        self._style = style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """As many tokens a line as fit."""
        lines: list[list[tuple[str, str, str]]] = []
        room = 0
        for token in self._tokens:
            text = "" if token.text is None else one_line(token.text, LONGEST).replace(" ", "␣")
            columns = text, str(token.id), f"{token.logprob:.2f}"
            width = max(map(cell_len, columns)) + 2
            if width > room or not lines:
                lines.append([])
                room = options.max_width
            lines[-1].append(columns)
            room -= width
        for line in lines:
            for row in range(3):
                yield Text("  ").join(self._cell(columns, row) for columns in line)
            yield Text()

    def _cell(self, columns: tuple[str, str, str], row: int) -> Text:
        width = max(map(cell_len, columns))
        text = " " * (width - cell_len(columns[row])) + columns[row]
        surprising = row == 2 and float(columns[2]) < SURPRISING
        return Text(text, self._style if row == 0 else theme.WARN if surprising else theme.DIM)


def token_grid(turn: TurnView, scale: float) -> Glosses:
    """The sampled tokens of a turn; ``scale`` is the advantage that gets the full colour."""
    trained = turn.weight is None or turn.weight > 0
    advantage = turn.advantage if turn.advantage is not None and trained else 0.0
    return Glosses(turn.tokens or (), theme.signed_style(advantage, scale, background=True))


class TerminalPicture:
    """A stored picture as half blocks in its colours; nothing where the terminal has none, or it is missing."""

    def __init__(self, media: MediaFolder, sha256: str) -> None:
        """The picture is read when it is drawn."""
        self._media, self._sha256 = media, sha256

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """As wide as it is drawn."""
        return Measurement(1, COLUMNS)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines of characters, of which each has its upper pixel as text and its lower one as background."""
        picture = thumbnail(self._media, self._sha256, COLUMNS) if console.color_system else None
        if picture is None:
            return
        for row in range(0, picture.height, 2):
            line = Text(no_wrap=True, overflow="crop")
            for column in range(picture.width):
                upper = picture.getpixel((column, row))
                lower = picture.getpixel((column, min(row + 1, picture.height - 1)))
                line.append("▀", f"rgb{upper} on rgb{lower}".replace(", ", ","))  # as rich reads colours
            yield line
