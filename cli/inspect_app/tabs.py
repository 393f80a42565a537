"""The tabs on the right: one turn, as what the policy saw, the whole history, its reply, its credit, and as stored.

Every distinction has a glyph or a word beside its colour.

The dialogs cover the screen for a moment: the keys, the ready views, two siblings beside each other.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from condensegrpo.cli.inspect_app.rows import RowList
from condensegrpo.cli.inspect_app.selection import Selection, fault
from condensegrpo.core.errors import CondenseError
from condensegrpo.core.messages import Message
from condensegrpo.core.trajectory import SpanStatus
from condensegrpo.core.wording import plural, ranges
from condensegrpo.display import context_bar, theme
from condensegrpo.display.context_bar import Mark
from condensegrpo.display.theme import neutral, one_line
from condensegrpo.display.trajectory_view import SURPRISING, TerminalPicture, token_grid
from condensegrpo.inspection.history import HistoryPiece, PieceStatus, WordChange, word_changes
from condensegrpo.inspection.opened import OpenedTrajectory, first_difference
from condensegrpo.inspection.panes import TokenView, TurnView, raw_turn
from condensegrpo.inspection.pictures import media_of
from condensegrpo.inspection.records import Group
from condensegrpo.inspection.views import READY_VIEWS

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
BINDINGS: list[BindingType] = [  # those in the line at the bottom first, the most needed ones at its left
    Binding("question_mark", "keys", "help", key_display="?"),
    Binding("q", "quit", "quit"),
    Binding("left_square_bracket", "step(-1)", "step", key_display="[ ]"),
    Binding("right_square_bracket", "step(1)", show=False),
    Binding("h", "sibling(-1)", "sibling", key_display="h l"),
    Binding("l", "sibling(1)", show=False),
    Binding("j", "turn(1)", "turn", key_display="j k"),
    Binding("k", "turn(-1)", show=False),
    Binding("1", f"tab('{TABS[0]}')", "tab", key_display="1-5"),
    *(Binding(str(number), f"tab('{name}')", show=False) for number, name in enumerate(TABS[1:], 2)),
    Binding("slash", "search", "search"),
    Binding("v", "views", "views"),
    Binding("d", "compare", "compare"),
    Binding("p", "problem", "problem"),
    Binding("w", "worse", "worse"),
    Binding("e", "kind", "evaluations"),
    Binding("x", "export", "export"),
    Binding("y", "copy", "copy"),
    Binding("f", "live", "follow"),
    Binding("t", "ids", "ids", show=False),
    Binding("escape", "groups", show=False),
]
HELP = """\
[ ]   step before, step after     e    training or evaluations
↑ ↓   group                       f    follow a live run
h l   sibling                     j k  turn
1     what the policy saw         2    the history, and what was dropped
3 t   the reply, ids of tokens    4    credit: why this advantage
5     the turn as it is stored    d    compare with the next sibling
/     search all steps: letters in order (qck finds quick), or a text
      = score == 0 and turns > 3  a condition; the fields are below
v     ready views                 p    this problem through training
w     problems that got worse     x    write this as a page to send
Esc   back to the groups          y    copy the command that shows this
q     quit
ctx tokens of the largest prompt   price of all calls, in tokens read
● signal: trains
█ pinned  ■ kept  ▒ rewritten  ░ dropped  + added by the condenser
"""
LONGEST = 2000  # characters of the fields


def tab_content(tab: str, selection: Selection, opened: OpenedTrajectory, *, ids: bool) -> RenderableType:
    """The content of a tab for the selected turn; ``ids``: the reply with the ids of its tokens."""
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
            return raw_tab(raw_turn(opened.record, turn))
    return shown(opened, turn)


def shown(opened: OpenedTrajectory, turn: int) -> RenderableType:
    """The exact prompt of the policy: tokens as text, or messages where there is no tokenizer, and its pictures."""
    view, prompt = opened.turns[turn], opened.prompt(turn)
    media = media_of(opened.batch.file)
    pictures = [TerminalPicture(media, sha256) for sha256 in opened.scored.trajectory.turns[turn].media]
    head = Text(f"{plural(view.context.tokens, 'token')}, as sampled from\n", theme.DIM)
    if prompt is not None:
        text = Text.assemble(head, neutral(prompt[:MOST]))
        return Lines(text, *pictures) if pictures else text
    head.append("no tokenizer.json was found: the messages without their template\n", theme.WARN)
    return Lines(head, *(_message(message) for message in view.messages), *pictures)


def full(opened: OpenedTrajectory, turn: int) -> RenderableType:
    """The whole history before the turn, with dropped and rewritten messages in their places."""
    statuses = opened.turns[turn].context.statuses
    unseen = "; ".join(
        f"{'turn' if len(units) == 1 else 'turns'} {ranges(units)} {status}"
        for status in (SpanStatus.DROPPED, SpanStatus.REWRITTEN)
        if (units := sorted(unit for unit, each in statuses.items() if each is status))
    )
    sentence = f"turn {turn} did not see: {unseen}" if unseen else f"turn {turn} saw the whole history"
    legend = Text.assemble((f"{sentence}\n", "bold"))
    declared = next((view.condensation for view in opened.turns[turn::-1] if view.condensation is not None), None)
    if declared is not None:
        legend.append(f"{one_line(declared.condenser, 30)}: {one_line(declared.reason, MOST) or 'not stated'}\n")
    for mark in MARKS.values():
        legend.append(f"{mark.glyph} ", mark.style).append(f"{mark.word}   ", theme.DIM)
    return Lines(legend, *map(_piece, opened.pieces(turn)))


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


def raw_tab(text: str) -> RenderableType:
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
    text = Text(f"{plural(view.output_tokens, 'token')}", theme.DIM)
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


def comparison_tab(first: OpenedTrajectory, second: OpenedTrajectory, turn: int) -> Iterator[RenderableType]:
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


class KeysDialog(ModalScreen[None]):
    """The keys."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q,enter", "dismiss", "Close")]

    def __init__(self, fields: Sequence[str]) -> None:
        """``fields``: of conditions."""
        super().__init__()
        self._fields = fields

    def compose(self) -> ComposeResult:
        """One box of text."""
        with VerticalScroll(classes="box help"):
            yield Static(Text(f"{HELP}fields  {one_line(', '.join(self._fields), LONGEST)}"))


class ViewsDialog(ModalScreen[int | None]):
    """A choice of the ready views."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,v", "dismiss", "Close")]

    def compose(self) -> ComposeResult:
        """A list."""
        yield RowList(
            *(Option(Text.assemble(f"{view.title:24}", (view.meaning, theme.DIM))) for view in READY_VIEWS),
            classes="box",
        )

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Choose a view."""
        self.dismiss(event.option_index)


class CompareDialog(ModalScreen[None]):
    """Two siblings from their first difference."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,d,q", "dismiss", "Close"),
        Binding("j,down", "turn(1)", "Turn"),
        Binding("k,up", "turn(-1)", "Turn"),
        Binding("l,right", "sibling(1)", "Other sibling"),
        Binding("h,left", "sibling(-1)", "Other sibling"),
    ]

    def __init__(self, first: OpenedTrajectory, sibling: Callable[[int], OpenedTrajectory]) -> None:
        """``sibling``: the one that many rows after the first."""
        super().__init__()
        self._first, self._second, self._sibling, self._by, self._turn = first, first, sibling, 0, 0

    def compose(self) -> ComposeResult:
        """A line about the difference, then two columns."""
        with Vertical(classes="box wide"):
            yield Static(id="difference")
            with Horizontal():
                for name in ("left", "right"):
                    with VerticalScroll():
                        yield Static(id=name)

    def on_mount(self) -> None:
        """Compare with the next sibling."""
        self.action_sibling(1)

    def action_sibling(self, by: int) -> None:
        """Compare with another sibling, from the first difference."""
        try:
            self._second = self._sibling(self._by + by)
        except CondenseError as error:
            self.notify(fault(error), severity="error", markup=False)
            return
        self._by += by
        different = first_difference(self._first.scored.trajectory, self._second.scored.trajectory)
        self._turn = different.turn if different is not None else 0
        where = "equal" if different is None else f"first difference: the {different.where} of turn {different.turn}"
        names = " and ".join(one_line(opened.record.id, 60) for opened in (self._first, self._second))
        self.query_one("#difference", Static).update(Text(f"{names}: {where}   (h l sibling, j k turn, Esc)", "bold"))
        self.action_turn(0)

    def action_turn(self, by: int) -> None:
        """Compare another turn."""
        last = max(len(self._first.turns), len(self._second.turns)) - 1
        self._turn = max(0, min(self._turn + by, last))
        for name, side in zip(("left", "right"), comparison_tab(self._first, self._second, self._turn), strict=True):
            self.query_one(f"#{name}", Static).update(side)
