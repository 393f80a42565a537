"""The tabs on the right: one turn, as what the policy saw, the whole history, its reply, its credit, and as stored.

Every distinction has a glyph or a word beside its colour.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from condensegrpo.cli.inspect_app.selection import Selection
from condensegrpo.core.messages import Message
from condensegrpo.core.trajectory import SpanStatus
from condensegrpo.core.wording import counted, ranges
from condensegrpo.display import context_bar, theme
from condensegrpo.display.context_bar import Mark
from condensegrpo.display.theme import neutral, one_line
from condensegrpo.display.trajectory_view import SURPRISING, TerminalPicture, token_grid
from condensegrpo.inspection.history import HistoryPiece, PieceStatus, WordChange, word_changes
from condensegrpo.inspection.opened import OpenedTrajectory
from condensegrpo.inspection.panes import TokenView, TurnView
from condensegrpo.inspection.panes import raw as stored_json
from condensegrpo.inspection.pictures import media_of
from condensegrpo.inspection.records import Group

TABS = ("shown", "full", "reply", "credit", "raw")
MOST = 200_000  # characters of a tab
ADDED = Mark("+", theme.REWRITTEN, "added")
MARKS = {
    PieceStatus.PINNED: context_bar.PINNED,
    PieceStatus.KEPT: context_bar.KEPT,
    PieceStatus.DROPPED: context_bar.DROPPED,
    PieceStatus.REWRITTEN: context_bar.REWRITTEN,
    PieceStatus.ADDED: ADDED,
}
CHANGES = {
    WordChange.SAME: "",
    WordChange.REMOVED: "dim strike",
    WordChange.INSERTED: f"bold underline {theme.REWRITTEN}",
}
PALE, DEEP = (30, 30, 36), (120, 70, 140)  # backgrounds of a token that was certain, and of one that surprised
DEEPEST = 4.0  # nats


def tab_content(tab: str, selection: Selection, opened: OpenedTrajectory, *, ids: bool) -> RenderableType:
    """What a tab shows of the turn that is selected; ``ids``: the reply with the ids of its tokens.

    Raises:
        CondenseError: a file was removed or replaced meanwhile.
    """
    turn = selection.turn
    if not opened.turns:
        return Text(neutral(opened.scored.trajectory.detail) or "no turn was sampled")
    match tab:
        case "full":
            return full(opened, turn)
        case "reply":
            return reply(opened, turn, ids=ids)
        case "credit" if selection.group is not None:
            return credit(opened, turn, selection.group)
        case "raw":
            return raw(stored_json(selection.index.line(opened.record), turn))
    return shown(opened, turn)


def shown(opened: OpenedTrajectory, turn: int) -> RenderableType:
    """Exactly what the policy was given: tokens as text, or messages where there is no tokenizer, and its pictures."""
    view, prompt = opened.turns[turn], opened.prompt(turn)
    media = media_of(opened.batch.file)
    pictures = [TerminalPicture(media, sha256) for sha256 in opened.scored.trajectory.turns[turn].media]
    head = Text(f"{counted(view.context.tokens, 'token')}, as sampled from\n", theme.DIM)
    if prompt is not None:
        text = Text.assemble(head, neutral(prompt[:MOST]))
        return Lines(text, *pictures) if pictures else text
    head.append("no tokenizer.json was found: the messages without their template\n", theme.WARN)
    return Lines(head, *(_message(message) for message in view.messages), *pictures)


def full(opened: OpenedTrajectory, turn: int) -> RenderableType:
    """The whole history before the turn, with what was dropped and rewritten in its place."""
    legend = Text.assemble((f"{_unseen(turn, opened.turns[turn].context.statuses)}\n", "bold"))
    declared = next((view.condensation for view in opened.turns[turn::-1] if view.condensation is not None), None)
    if declared is not None:
        legend.append(f"{one_line(declared.condenser, 30)}: {one_line(declared.reason, MOST) or 'not stated'}\n")
    for mark in MARKS.values():
        legend.append(f"{mark.glyph} ", mark.style).append(f"{mark.word}   ", theme.DIM)
    return Lines(legend, *map(_piece, opened.pieces(turn)))


def _unseen(turn: int, statuses: Mapping[int, SpanStatus]) -> str:
    """What a turn did not see of the turns before it, in a sentence."""
    parts = [
        f"{'turn' if len(units) == 1 else 'turns'} {ranges(units)} {status}"
        for status in (SpanStatus.DROPPED, SpanStatus.REWRITTEN)
        if (units := sorted(unit for unit, each in statuses.items() if each is status))
    ]
    return f"turn {turn} did not see: {'; '.join(parts)}" if parts else f"turn {turn} saw the whole history"


def reply(opened: OpenedTrajectory, turn: int, *, ids: bool) -> RenderableType:
    """The sampled tokens: darker where they surprised, underlined by the sign of the advantage; then what followed."""
    view, tokens = opened.turns[turn], opened.tokens(turn)
    after = [_message(message) for message in view.observations]
    grid = token_grid(replace(view, tokens=tokens), abs(view.advantage or 1.0)) if ids else _inline(view, tokens)
    return Lines(_reply_head(view), grid, Text(), *after)


def credit(opened: OpenedTrajectory, turn: int, group: Group) -> RenderableType:
    """Reward parts, score, advantage and weight, with the formulas filled in."""
    parts: list[RenderableType] = []
    if opened.batch.is_evaluation:
        parts.append(Text("of an evaluation: nothing is learned from it\n", theme.WARN))
    for line in opened.credit(turn, group):
        head = Table.grid(expand=True)
        head.add_column(style="bold")
        head.add_column(justify="right", style="bold", no_wrap=True)
        head.add_row(one_line(line.name, 40), line.value)
        parts += [head, *([Padding(Text(neutral(line.formula), theme.DIM), (0, 0, 0, 2))] if line.formula else [])]
    return Lines(*parts)


def raw(text: str) -> RenderableType:
    """The turn as it is stored."""
    more = f"\n… {len(text) - MOST} more characters" if len(text) > MOST else ""
    return Text(f"{neutral(text[:MOST])}{more}")


def _message(message: Message) -> Text:
    speaker = one_line(message.name, 24) if message.name else message.role
    return Text.assemble((f"── {speaker}\n", theme.HEAD), neutral(message.text[:MOST]))


def _piece(piece: HistoryPiece) -> Text:
    mark = MARKS[piece.status]
    turn = "" if piece.turn is None else f"turn {piece.turn} · "
    speaker = one_line(piece.name, 24) if piece.name else piece.role
    text = Text.assemble((f"{mark.glyph} {turn}{speaker} · {mark.word}\n", mark.style))
    if piece.rewritten is not None:
        for change, words in word_changes(piece.text[:MOST], piece.rewritten[:MOST]):
            text.append(neutral(words), CHANGES[change])
        return text
    return text.append(neutral(piece.text[:MOST]), "dim" if piece.status is PieceStatus.DROPPED else "")


def _reply_head(view: TurnView) -> Text:
    text = Text(f"{counted(view.output_tokens, 'token')}", theme.DIM)
    if view.logprob is not None:
        text.append(f", {-view.logprob:.3f} nats of surprise a token", theme.DIM)
    if view.advantage is not None:
        sign = "▲ made likelier (underlined)" if view.advantage > 0 else "▼ made less likely (underlined twice)"
        style = theme.signed_style(view.advantage, 1.0)
        text.append(f"\nadvantage {view.advantage:+.3f} {sign if view.advantage else '○ no signal'}", style)
    if view.weight == 0:
        text.append("   not trained", theme.WARN)
    return text.append("\n")


def _inline(view: TurnView, tokens: tuple[TokenView, ...]) -> Text:
    """The reply in one text. Bold, too: less likely than one in seven."""
    apart = " " in view.reply and not any(" " in (token.text or "") for token in tokens)  # a vocabulary of whole words
    return Text(" " * apart).join(
        Text(f"⟨{token.id}⟩" if token.text is None else neutral(token.text), _token_style(view, token))
        for token in tokens
    )


def _token_style(view: TurnView, token: TokenView) -> Style:
    strength = min(1.0, token.surprise / DEEPEST)
    red, green, blue = (round(low + (high - low) * strength) for low, high in zip(PALE, DEEP, strict=True))
    trained = view.advantage if view.advantage is not None and view.weight != 0 else 0.0
    return Style(
        bgcolor=f"#{red:02x}{green:02x}{blue:02x}",
        color="#ffffff",
        bold=token.logprob < SURPRISING,
        underline=trained > 0,
        underline2=trained < 0,
    )


def comparison(first: OpenedTrajectory, second: OpenedTrajectory, turn: int) -> Iterator[RenderableType]:
    """The turn of both trajectories beside each other."""
    for opened in (first, second):
        figures = opened.record.figures
        text = Text.assemble((f"{one_line(figures.id, 60)}\n", "bold"))
        stop = one_line(figures.stop, 20)
        text.append(f"score {figures.total:.4g}   stop {stop}   turns {figures.turns}\n", theme.DIM)
        if turn >= len(opened.turns):
            yield text.append("it had ended before this turn", theme.WARN)
            continue
        view = opened.turns[turn]
        advantage = "" if view.advantage is None else f"   advantage {view.advantage:+.3f}"
        text.append(f"turn {turn}   context {view.context.tokens} tokens{advantage}\n", theme.DIM)
        for message in view.messages[-2:]:
            text.append_text(_message(message)).append("\n")
        yield text.append("── reply\n", theme.HEAD).append(neutral(view.reply), "bold")
