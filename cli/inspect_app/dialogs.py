"""What covers the screen for a moment: the keys, the ready views, and two siblings beside each other."""

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from condensegrpo.cli import theme
from condensegrpo.cli.inspect_app.selection import Opened
from condensegrpo.cli.inspect_app.tabs import comparison
from condensegrpo.inspection.comparison import first_difference
from condensegrpo.inspection.views import READY_VIEWS

KEYS = """\
[ ]      step before, step after         e   training or evaluations      f   follow a live run
↑ ↓      group                           h l sibling                      j k turn
/        search all steps: letters in order (qck finds quick), and texts as they stand
         = score == 0 and turns > 3      a condition over all steps
v        ready views                     p   this problem through training
d        compare with the next sibling   y   copy the command that shows this
1 … 5    Shown Full Reply Credit Raw     t   ids of the tokens of the reply
Esc      back to the groups              q   quit

█ pinned  ■ kept  ▒ rewritten  ░ dropped  + added by the condenser
"""


class KeysDialog(ModalScreen[None]):
    """The keys."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q,enter", "dismiss", "Close")]

    def compose(self) -> ComposeResult:
        """One box of text."""
        yield Static(Text(KEYS), classes="box")


class ViewsDialog(ModalScreen[int | None]):
    """A choice of the ready views."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,v", "dismiss", "Close")]

    def compose(self) -> ComposeResult:
        """A list."""
        yield OptionList(
            *(Option(Text.assemble(view.title, (f"   {view.where}", theme.DIM))) for view in READY_VIEWS), classes="box"
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

    def __init__(self, first: Opened, sibling: Callable[[int], Opened]) -> None:
        """``sibling``: that many places behind the first."""
        super().__init__()
        self._first, self._sibling, self._by, self._turn = first, sibling, 0, 0

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
        self._by += by
        self._second = self._sibling(self._by)
        different = first_difference(self._first.scored.trajectory, self._second.scored.trajectory)
        self._turn = different.turn if different is not None else 0
        where = "equal" if different is None else f"first difference: the {different.where} of turn {different.turn}"
        names = f"{self._first.record.id} and {self._second.record.id}"
        self.query_one("#difference", Static).update(Text(f"{names}: {where}   (h l sibling, j k turn, Esc)", "bold"))
        self.action_turn(0)

    def action_turn(self, by: int) -> None:
        """Compare another turn."""
        last = max(len(self._first.turns), len(self._second.turns)) - 1
        self._turn = max(0, min(self._turn + by, last))
        for name, side in zip(("left", "right"), comparison(self._first, self._second, self._turn), strict=True):
            self.query_one(f"#{name}", Static).update(side)
