"""The layout of the inspector: what is drawn where. ``Selection`` knows what is shown."""

from collections.abc import Iterable

from rich.console import RenderableType
from rich.text import Text
from textual.app import App, ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Footer, Input, OptionList, Static, TabbedContent, TabPane
from textual.widgets.option_list import Option

from condensegrpo.cli.inspect_app import rows, tabs
from condensegrpo.cli.inspect_app.selection import PAGE, Listing, Selection, fault
from condensegrpo.core.errors import CondenseError
from condensegrpo.core.wording import counted
from condensegrpo.display import theme
from condensegrpo.display.neutral import neutral, one_line
from condensegrpo.inspection.batches import TrajectoryBatch
from condensegrpo.inspection.opened import OpenedTrajectory
from condensegrpo.inspection.panes import raw
from condensegrpo.inspection.records import TrajectoryRecord

TABS = ("shown", "full", "reply", "credit", "raw")
NARROW = 110  # columns below which groups and turns lie above each other
STYLE = """
#top { height: 2; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
#body { height: 1fr; }
#lists { width: 61%; }
#left { width: 10fr; }
#middle { width: 11fr; border-left: solid $panel; }
.-narrow #lists { width: 50%; layout: vertical; }
.-narrow #left, .-narrow #middle { width: 1fr; height: 2fr; border: none; }
.-narrow #middle { height: 3fr; }
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
    HORIZONTAL_BREAKPOINTS: list[tuple[int, str]] | None = [(0, "-narrow"), (NARROW, "-wide")]  # noqa: RUF012  as in App

    def __init__(self, selection: Selection) -> None:
        super().__init__()
        self.selection = selection
        self.listed: list[TrajectoryRecord] | None = None  # of the matches; None: the groups are listed
        self.listing: Listing | None = None  # the condition that they match, if it was one
        self.ids = False  # whether the reply is shown with the ids of its tokens
        self.live = False  # whether a live run is followed
        self.batches: list[TrajectoryBatch] = []  # of the kind that is shown, for the lines at the top
        self.note = ""  # how far the index is
        self.drawn = selection.batch  # whose groups were listed last

    def compose(self) -> ComposeResult:
        """Top, left, middle, right, keys."""
        yield Static(id="top")
        with Horizontal(id="body"):
            with Horizontal(id="lists"):
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
        self.listed = self.listing = None
        self.read_batches()
        self._fill("list", map(rows.group_row, groups))
        more = "" if len(groups) % PAGE or not groups else " or more"
        self._title(f"{counted(len(groups), 'group', 'groups')}{more}")
        self.drawn = self.selection.batch
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

    def show_matches(
        self, title: str, records: list[TrajectoryRecord], prompts: Iterable[Text], listing: Listing | None = None
    ) -> None:
        """List trajectories of any steps, and show the first, or the one that was asked for with the listing."""
        self.listed, self.listing = records, listing
        self._fill("list", prompts)
        self._title(f"{title}   (Esc: groups)")
        self.query_one("#list").focus()
        first = listing.first if listing is not None else None
        places = [place for place, record in enumerate(records) if first is not None and record.place == first.place]
        if places:
            self.highlight("list", places[0])
        elif records and first is None:
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
        options = self.query_one(f"#{name}", OptionList)
        with self.prevent(OptionList.OptionHighlighted):
            options.highlighted = place
        self.call_after_refresh(options.scroll_to_highlight)  # now it may have no size yet

    def _title(self, text: str) -> None:
        self.query_one("#list-title", Static).update(Text(neutral(text)))

    def draw(self) -> None:
        """Draw the top, the head of the trajectory and the tab that is open."""
        selection, opened = self.selection, self.selection.opened
        note = f"{'following  ' if self.live else ''}{self.note}"
        sparks = 16 if self.size.width < NARROW else 32
        self.query_one("#top", Static).update(rows.top_line(selection.batch, self.batches, sparks, note=note))
        if opened is None:
            return
        batch = opened.batch
        where = "" if batch.file == selection.batch.file or batch.number is None else f"   step {batch.number}"
        self.query_one("#head", Static).update(
            Text(f"{one_line(opened.record.id, 60)}{where}   turn {selection.turn} of {len(opened.turns)}")
        )
        if opened.turns:
            self.highlight("turns", selection.turn)
        tab = self.query_one(TabbedContent).active or TABS[0]
        try:
            content = self._content(tab, opened)
        except CondenseError as error:  # a file that was removed or replaced meanwhile
            content = Text(fault(error), theme.BAD)
        self.query_one(f"#{tab}-text", Static).update(content)

    def _content(self, tab: str, opened: OpenedTrajectory) -> RenderableType:
        turn = self.selection.turn
        if not opened.turns:
            return Text(neutral(opened.scored.trajectory.detail) or "no turn was sampled")
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
