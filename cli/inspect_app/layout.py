"""The layout of the inspector: what is drawn where. ``Selection`` knows what is shown."""

from collections.abc import Iterable

from rich.console import RenderableType
from rich.text import Text
from textual.app import App, ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Footer, Input, OptionList, Static, TabbedContent, TabPane
from textual.widgets.option_list import Option

from condensegrpo.cli.inspect_app import rows, tabs
from condensegrpo.cli.inspect_app.selection import PAGE, Opened, Selection, fault
from condensegrpo.core.errors import CondenseError
from condensegrpo.inspection.batches import TrajectoryBatch
from condensegrpo.inspection.panes import raw
from condensegrpo.inspection.records import TrajectoryRecord

TABS = ("shown", "full", "reply", "credit", "raw")
STYLE = """
#top { height: 2; padding: 0 1; }
#body { height: 1fr; }
#left { width: 30%; min-width: 24; }
#middle { width: 32%; min-width: 26; border-left: solid $panel; }
#right { width: 1fr; border-left: solid $panel; }
#search { display: none; }
OptionList { border: none; text-wrap: nowrap; text-overflow: ellipsis; }
#list, #turns { height: 1fr; }
#siblings { height: auto; max-height: 40%; }
.title { padding: 0 1; text-style: bold; height: auto; }
TabPane { padding: 0 1; }
ModalScreen { align: center middle; }
.box { width: auto; max-width: 96%; height: auto; border: round $primary; padding: 1 2; background: $surface; }
.wide { width: 96%; height: 90%; }
.wide Horizontal { height: 1fr; }
.wide VerticalScroll { width: 1fr; padding: 0 1; }
.wide Static { width: 1fr; }
"""


class InspectorLayout(App[None]):
    """Lists on the left, siblings and turns in the middle, the tabs of one turn on the right."""

    CSS = STYLE
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, selection: Selection) -> None:
        super().__init__()
        self.selection = selection
        self.listed: list[TrajectoryRecord] | None = None  # of the matches; None: the groups are listed
        self.ids = False  # whether the reply is shown with the ids of its tokens
        self.live = False  # whether a live run is followed
        self.batches: list[TrajectoryBatch] = []  # of the kind that is shown, for the lines at the top
        self.note = ""  # how far the index is

    def compose(self) -> ComposeResult:
        """Top, left, middle, right, keys."""
        yield Static(id="top")
        with Horizontal(id="body"):
            with Vertical(id="left"):
                yield Static(id="list-title", classes="title")
                yield Input(placeholder="text, or = score == 0 and turns > 3", id="search")
                yield OptionList(id="list", markup=False)
            with Vertical(id="middle"):
                yield Static(id="head", classes="title")
                yield OptionList(id="siblings", markup=False)
                yield OptionList(id="turns", markup=False)
            with TabbedContent(id="right"):
                for name in TABS:
                    with TabPane(name.title(), id=name), VerticalScroll():
                        yield Static(id=f"{name}-text", markup=False)
        yield Footer()

    def show_groups(self, record: TrajectoryRecord | None = None, turn: int = 0) -> None:
        """List the groups of the batch, and show a trajectory of one."""
        groups = self.selection.groups
        self.listed = None
        self.read_batches()
        self._fill("list", map(rows.group_row, groups))
        more = "" if len(groups) % PAGE or not groups else " or more"
        self._title(f"{len(groups)}{more} groups")
        if record is None:
            record = next((group for group in groups if group.signal), groups[0]).siblings[0]
        names = [group.id for group in groups]
        if record.group in names:
            self.highlight("list", names.index(record.group))
        self.show(record, turn)

    def read_batches(self) -> None:
        """Read the figures of the steps, or of the evaluations of this name."""
        same = {*self.selection.files}
        self.batches = [batch for batch in self.selection.index.batches() if batch.file in same]

    def show_matches(self, title: str, records: list[TrajectoryRecord], prompts: Iterable[Text]) -> None:
        """List trajectories of any steps, and show the first."""
        self.listed = records
        self._fill("list", prompts)
        self._title(f"{title}   (Esc: groups)")
        self.query_one("#list").focus()
        if records:
            self.highlight("list", 0)
            self.show(records[0])

    def show(self, record: TrajectoryRecord, turn: int = 0) -> None:
        """Show a trajectory at a turn."""
        try:
            opened = self.selection.show(record, turn)
        except CondenseError as error:
            self.notify(fault(error), severity="error", markup=False)
            return
        siblings = self.selection.group.siblings if self.selection.group else ()
        self._fill("siblings", map(rows.sibling_row, siblings))
        self.highlight("siblings", [sibling.id for sibling in siblings].index(record.id))
        self._fill("turns", (rows.turn_row(opened, number) for number in range(len(opened.turns))))
        self.draw()

    def _fill(self, name: str, prompts: Iterable[Text]) -> None:
        with self.prevent(OptionList.OptionHighlighted):
            self.query_one(f"#{name}", OptionList).set_options([Option(prompt) for prompt in prompts])

    def highlight(self, name: str, place: int) -> None:
        """Mark a row of a list, without acting on it."""
        with self.prevent(OptionList.OptionHighlighted):
            self.query_one(f"#{name}", OptionList).highlighted = place

    def _title(self, text: str) -> None:
        self.query_one("#list-title", Static).update(Text(text))

    def draw(self) -> None:
        """Draw the top, the head of the trajectory and the tab that is open."""
        selection, opened = self.selection, self.selection.opened
        note = f"{'following  ' if self.live else ''}{self.note}"
        self.query_one("#top", Static).update(rows.top_line(selection.batch, self.batches, note=note))
        if opened is None:
            return
        batch = opened.batch
        where = "" if batch.file == selection.batch.file or batch.number is None else f"   step {batch.number}"
        self.query_one("#head", Static).update(
            Text(f"{opened.record.id}{where}   turn {selection.turn} of {len(opened.turns)}")
        )
        if opened.turns:
            self.highlight("turns", selection.turn)
        tab = self.query_one(TabbedContent).active or TABS[0]
        content = (
            self._content(tab, opened)
            if opened.turns
            else Text(opened.scored.trajectory.detail or "no turn was sampled")
        )
        self.query_one(f"#{tab}-text", Static).update(content)

    def _content(self, tab: str, opened: Opened) -> RenderableType:
        turn = self.selection.turn
        match tab:
            case "full":
                return tabs.full(opened, turn)
            case "reply":
                return tabs.reply(opened, turn, ids=self.ids)
            case "credit" if self.selection.group is not None:
                return tabs.credit(opened, turn, self.selection.group)
            case "raw":
                return tabs.raw(raw(self.selection.index.line(opened.record), turn))
        return tabs.shown(opened, turn)

    def on_tabbed_content_tab_activated(self) -> None:
        """Draw the tab that was opened."""
        self.draw()
