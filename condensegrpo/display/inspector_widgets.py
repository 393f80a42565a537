"""Widgets of the application of ``condensegrpo inspect``: its lists, and the dialogs over them."""

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.strip import Strip
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from condensegrpo.core.errors import CondenseError
from condensegrpo.display import theme
from condensegrpo.display.inspector import comparison_tab
from condensegrpo.display.theme import neutral, one_line
from condensegrpo.inspection.history import first_difference
from condensegrpo.inspection.index import OpenedTrajectory
from condensegrpo.inspection.views import READY_VIEWS

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


def fault(error: CondenseError) -> str:
    """An error as one line of a notice."""
    return neutral(str(error).splitlines()[0])


class RowList(OptionList):
    """A list whose selected row is drawn in one colour: the colours of its words would not stand out."""

    DEFAULT_CSS = """
    RowList { border: none; background: $background; text-wrap: nowrap; text-overflow: ellipsis; }
    RowList:focus { border: none; background-tint: transparent; }
    RowList > .option-list--option-highlighted { color: #000000; background: #a8a8a8; text-style: bold; }
    RowList:focus > .option-list--option-highlighted { color: #000000; background: #e0e0e0; text-style: bold; }
    """

    def render_line(self, y: int) -> Strip:
        """One line on the screen."""
        strip = super().render_line(y)
        if self.highlighted is None or all(
            segment.style.meta.get("option") != self.highlighted for segment in strip if segment.style
        ):
            return strip
        row = self.get_component_rich_style("option-list--option-highlighted")
        return Strip(Segment.apply_style(strip, post_style=Style.from_color(row.color, row.bgcolor)), strip.cell_length)


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
