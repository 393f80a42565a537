"""``condensegrpo inspect`` on a terminal: the layout, and what the keys do.

Lists on the left, siblings and turns in the middle, the tabs of one turn on the right. ``Selection`` holds the state;
``display.inspector`` draws it; reading and searching run in threads and show their results through the event loop.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Footer, Input, OptionList, Static, TabbedContent, TabPane
from textual.widgets.option_list import Option
from textual.worker import get_current_worker

from condensegrpo.cli import inspect_selection as lists
from condensegrpo.cli.inspect_selection import PAGE, Choice, Listed, Listing, Selection, write_selection
from condensegrpo.core.errors import CondenseError
from condensegrpo.core.wording import plural
from condensegrpo.display import inspector, theme
from condensegrpo.display.inspector import TABS, tab_content
from condensegrpo.display.inspector_widgets import CompareDialog, KeysDialog, RowList, ViewsDialog, fault
from condensegrpo.display.theme import neutral, one_line
from condensegrpo.inspection.filters import fields_in
from condensegrpo.inspection.index import Index, TrajectoryBatch
from condensegrpo.inspection.records import IndexedTrajectory
from condensegrpo.inspection.views import MOST, READY_VIEWS, Hit, search

POLL_SECONDS = 2.0  # between looks at a live run
NOTE_SECONDS = 0.5  # between notes of how much was read
READING = "reading"  # begins the note of how much was read
SEARCH_SECONDS = 2.0  # of a search, after which it shows how much was read
HITS_AT_A_TIME = 50  # that a search shows at once
NARROW = 110  # columns below which groups and turns lie above each other
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
Tab { color: $foreground 70%; }
Footer, FooterKey, FooterKey .footer-key--key { background: $background; }
#list, #turns { height: 1fr; }
#siblings { height: auto; max-height: 40%; }
.title { padding: 0 1; text-style: bold; height: auto; }
TabPane { padding: 0 1; }
ModalScreen { align: center middle; }
.box { width: auto; max-width: 96%; height: auto; max-height: 100%; }
.box { border: round $primary; padding: 1 2; background: $surface; }
.help { width: 78; max-width: 100%; padding: 0 1; scrollbar-size-vertical: 1; }
.wide { width: 96%; height: 90%; }
.wide Horizontal { height: 1fr; }
.wide VerticalScroll { width: 1fr; padding: 0 1; }
.wide Static { width: 1fr; }
"""


class InspectorApp(App[None]):
    """The application: keys and the mouse move the ``Selection``."""

    CSS = STYLE
    BINDINGS: ClassVar[list[BindingType]] = BINDINGS
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS: list[tuple[int, str]] | None = [(0, "-narrow"), (NARROW, "-wide")]  # noqa: RUF012  as in App

    def __init__(
        self,
        selection: Selection,
        *,
        turn: int = 0,
        first: Listing | Literal["worse"] | None = None,
    ) -> None:
        """An application that begins with a trajectory or a list.

        Args:
            selection: what is shown.
            turn: of the trajectory that is shown first.
            first: what is listed first, ``worse`` for the problems that got worse; None: the groups.
        """
        super().__init__()
        self.selection = selection
        self.listed: Listed | None = None  # matches; None: the groups are listed
        self.ids = False  # whether the reply is shown with the ids of its tokens
        self.live = False  # whether a live run is followed
        self.batches: tuple[TrajectoryBatch, ...] = ()  # that were read, for the curves at the top
        self.note = ""  # how much was read
        self.drawn = selection.batch  # whose groups were listed last
        self._turn, self._first = turn, first

    @property
    def listing(self) -> Listing | None:
        """The condition that the list matches, if it was one."""
        return self.listed.listing if self.listed is not None else None

    def compose(self) -> ComposeResult:
        """Top, left, middle, right, keys."""
        yield Static(id="top")
        with Horizontal(id="body"):
            with Horizontal(id="lists"):
                with Vertical(id="left"):
                    yield Static(id="list-title", classes="title")
                    yield Input(placeholder="text, or = score == 0 and turns > 3", id="search")
                    yield RowList(id="list", markup=False)
                with Vertical(id="middle"):
                    yield Static(id="head", classes="title")
                    yield RowList(id="siblings", markup=False)
                    yield RowList(id="turns", markup=False)
            with TabbedContent(id="right"):
                for name in TABS:
                    with TabPane(name.title(), id=name), VerticalScroll():
                        yield Static(id=f"{name}-text", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Show the batch that was opened; the rest is read in a thread."""
        self.title = "condensegrpo inspect"
        self.show_groups(self.selection.opened.record, self._turn)
        self.query_one("#list").focus()
        self.set_interval(POLL_SECONDS, self._poll)
        self.in_thread("read", lambda: self._read_all(self._first))

    # the lists and the tabs

    def show_groups(self, record: IndexedTrajectory | None = None, turn: int = 0) -> None:
        """List the groups of the batch, and show a trajectory of one."""
        groups = self.selection.groups
        self.listed = None
        self.batches = self.selection.index.batches()
        self._fill("list", map(inspector.group_row, groups))
        more = "" if len(groups) % PAGE or not groups else " or more"
        self._set_title(f"{plural(len(groups), 'group')}{more}")
        self.drawn = self.selection.batch
        record = record or self.selection.first
        names = [group.id for group in groups]
        if record.figures.group_id in names:
            self._highlight("list", names.index(record.figures.group_id))
        self.show(record, turn)

    def show_listed(self, listed: Listed) -> None:
        """List trajectories of any steps, and show the first, or the one that the listing names."""
        self.listed = listed
        self.query_one("#search").display = False
        self._fill("list", listed.rows)
        self._set_title(f"{listed.title}   (Esc: groups)")
        self.query_one("#list").focus()
        first = self.listing.first if self.listing is not None else None
        matches = [
            at for at, record in enumerate(listed.records) if first is not None and record.stored == first.stored
        ]
        if matches:
            self._highlight("list", matches[0])
        elif listed.records and first is None:
            self._highlight("list", 0)
            self.show(listed.records[0], self._turn if listed.listing is self._first else 0)

    def show(self, record: IndexedTrajectory, turn: int = 0) -> None:
        """Show a trajectory at a turn."""
        try:
            opened = self.selection.show(record, turn)
        except CondenseError as error:
            self._complain(error)
            return
        siblings = self.selection.group.siblings
        self._fill("siblings", map(inspector.sibling_row, siblings))
        self._highlight("siblings", [sibling.id for sibling in siblings].index(record.id))
        self._fill("turns", (inspector.turn_row(opened, number) for number in range(len(opened.turns))))
        self.draw()

    def show_turn(self, turn: int) -> None:
        """Go to a turn."""
        self.selection.show(self.selection.opened.record, turn)
        self.draw()

    def draw(self) -> None:
        """Draw the top, the head of the trajectory and the tab that is open."""
        selection, opened = self.selection, self.selection.opened
        note = f"{'following  ' if self.live else ''}{self.note}"
        sparks = 16 if self.size.width < NARROW else 32
        batch = selection.batch if self.listed is None else opened.batch
        self.query_one("#top", Static).update(inspector.top_line(batch, self._beside(batch), sparks, note=note))
        self.query_one("#head", Static).update(
            Text(f"{one_line(opened.record.id, 60)}   turn {selection.turn} of {len(opened.turns)}")
        )
        if opened.turns:
            self._highlight("turns", selection.turn)
        tab = self.query_one(TabbedContent).active or TABS[0]
        try:
            content = tab_content(tab, opened, selection.turn, selection.group, ids=self.ids)
        except CondenseError as error:  # a file that was removed or replaced meanwhile
            content = Text(fault(error), theme.BAD)
        self.query_one(f"#{tab}-text", Static).update(content)

    def _fill(self, name: str, prompts: Iterable[Text]) -> None:
        with self.prevent(OptionList.OptionHighlighted):
            self.query_one(f"#{name}", OptionList).set_options([Option(prompt) for prompt in prompts])

    def _highlight(self, name: str, row: int) -> None:
        """Mark a row of a list, without acting on it."""
        options = self.query_one(f"#{name}", OptionList)
        with self.prevent(OptionList.OptionHighlighted):
            options.highlighted = row
        self.call_after_refresh(options.scroll_to_highlight)  # now it may have no size yet

    def _set_title(self, text: str) -> None:
        self.query_one("#list-title", Static).update(Text(neutral(text)))

    def _beside(self, batch: TrajectoryBatch) -> list[TrajectoryBatch]:
        """The batches of the kind of one: the training steps, or the evaluations of its name."""
        return [each for each in self.batches if each.evaluation == batch.evaluation]

    def _complain(self, error: CondenseError) -> None:
        self.notify(fault(error), severity="error", markup=False)

    # keys and the mouse

    def on_tabbed_content_tab_activated(self) -> None:
        """Draw the tab that was opened."""
        self.draw()

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Show the row that the arrow keys or the mouse chose."""
        row = event.option_index
        match event.option_list.id:
            case "list" if self.listed is not None:
                self.show(self.listed.records[row])
            case "list":
                if row == len(self.selection.groups) - 1 and self.selection.more_groups():
                    added = self.selection.groups[row + 1 :]
                    event.option_list.add_options(Option(inspector.group_row(added_group)) for added_group in added)
                self.show(self.selection.groups[row].siblings[0])
            case "siblings":
                self.show(self.selection.group.siblings[row], self.selection.turn)
            case "turns":
                self.show_turn(row)

    def action_turn(self, by: int) -> None:
        """Go to another turn."""
        self.show_turn(self.selection.turn + by)

    def action_sibling(self, by: int) -> None:
        """Go to another sibling, at the same turn."""
        siblings = self.selection.siblings
        self.show(siblings[by % len(siblings)], self.selection.turn)

    def action_step(self, by: int) -> None:
        """Go to another step."""
        if self.listed is not None:  # beside the one of the top line
            self._go(self.selection.opened.record.file)
        self._go(self.selection.step(by), "there is no further step")

    def action_kind(self) -> None:
        """Go to the evaluations, or back to training."""
        self._go(self.selection.other_kind(), "there are no evaluations beside these trajectories")

    def _go(self, file: Path | None, otherwise: str = "", record: IndexedTrajectory | None = None) -> None:
        """Show the groups of a file, or say that there is none."""
        if file is None:
            self.notify(otherwise)
            return
        try:
            self.selection.go_to(file)
            self.show_groups(record, self.selection.turn if record is not None else 0)
        except CondenseError as error:
            self._complain(error)

    def action_tab(self, name: str) -> None:
        """Open a tab."""
        self.query_one(TabbedContent).active = name

    def action_ids(self) -> None:
        """Show the ids of the reply's tokens, or its text."""
        self.ids = not self.ids
        self.action_tab("reply")
        self.draw()

    def action_groups(self) -> None:
        """List the groups of the step again, with the trajectory that is open."""
        self.query_one("#search").display = False
        self.workers.cancel_group(self, "search")
        record = self.selection.opened.record
        if self.listed is not None:
            self._go(record.file, record=record)
        self.query_one("#list").focus()

    def action_copy(self) -> None:
        """Copy the command that shows this."""
        command = self.selection.command(self.listing)
        self.copy_to_clipboard(command)
        self.notify(neutral(command), title="copied", markup=False)

    def action_problem(self) -> None:
        """List the groups of this problem in all steps."""
        self.show_listed(lists.visits(self.selection.index, self.selection.opened.record.figures.problem_id))

    def action_worse(self) -> None:
        """List the problems that got worse."""
        self.find(lambda: lists.worse(self.selection.index, self._so_far))

    def action_export(self) -> None:
        """Write the listed trajectories as a page for somebody else."""
        self.notify("writing a page")
        self.in_thread("export", self._export)

    def action_compare(self) -> None:
        """Compare with another sibling."""
        selection, siblings = self.selection, self.selection.siblings  # of now: the selection may follow a live run
        if len(siblings) < 2:
            self.notify("it has no sibling")
        else:
            self.push_screen(CompareDialog(selection.opened, lambda by: selection.read(siblings[by % len(siblings)])))

    def action_keys(self) -> None:
        """Show the keys."""
        self.push_screen(KeysDialog(self.selection.index.field_names()))

    def action_live(self) -> None:
        """Follow a live run: show its newest step, and each that comes."""
        self.live = not self.live
        if self.live and self.selection.files:
            self._go(self.selection.files[-1])
        self.draw()

    def action_views(self) -> None:
        """Choose a ready view."""
        self.push_screen(ViewsDialog(), self._show_view)

    def _show_view(self, number: int | None) -> None:
        if number is not None:
            view = READY_VIEWS[number]
            self.find_where(Listing(view.title, view.where, view.sort, ("--view", view.name)))

    def action_search(self) -> None:
        """Open the input of a search."""
        field = self.query_one("#search", Input)
        if not field.display:  # else it has a condition to correct
            field.display, field.value = True, ""
        field.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Search for a text, or for a condition after a =; one that cannot be read stays, to be corrected."""
        query = event.value.strip()
        event.input.display = query.startswith("=")
        if query.startswith("="):
            where = query.removeprefix("=").strip()
            self.find_where(Listing(where, where, None, ("--where", where)))
        elif query:
            self.in_thread("search", lambda: self._hits(query))

    # threads

    def in_thread(self, group: str, work: Callable[[], Iterator[Callable[[], object] | None]]) -> None:
        """Run the generator that ``work`` returns in a thread, until another of its group begins.

        What it yields is called in the event loop; None lets it end.
        """

        def steps() -> None:
            worker = get_current_worker()
            try:
                for show in work():
                    if worker.is_cancelled:
                        return
                    if show is not None:
                        self.call_from_thread(show)
            except CondenseError as error:
                self.call_from_thread(self._complain, error)

        self.run_worker(steps, thread=True, exclusive=True, group=group)

    def find_where(self, listing: Listing) -> None:
        """List the trajectories for which a condition holds."""
        self.find(lambda: lists.matching(self.selection.index, listing, self._so_far))

    def find(self, search_for: Callable[[], Listed]) -> None:
        """List the result of a function that may take long."""

        def found() -> Iterator[Callable[[], object]]:
            yield partial(self.show_listed, search_for())

        self.in_thread("search", found)

    def _hits(self, query: str) -> Iterator[Callable[[], object] | None]:
        """List the trajectories of all steps that a search finds, as they are found."""
        found, began, worker = list[Hit](), time.monotonic(), get_current_worker()

        def noted(share: float) -> None:
            note = f"searching {share:.0%}" if share < 1 else ""
            if note != self.note and time.monotonic() > began + SEARCH_SECONDS and not worker.is_cancelled:
                self.note = note
                self.call_from_thread(self.draw)

        try:
            for hit in search(self.selection.index, query, on_read=noted):
                found.append(hit)
                shown = len(found) in (1, HITS_AT_A_TIME)
                yield partial(self.show_listed, lists.hits(query, found, " …")) if shown else None
                if len(found) == MOST:
                    break
        except CondenseError as error:
            yield partial(self._complain, error)
        yield partial(self.show_listed, lists.hits(query, found, ""))

    def _export(self) -> Iterator[Callable[[], object]]:
        """Write a page of the listed trajectories and of the open group."""
        text = write_selection(self.selection, None if self.listed is None else self.listed.records)
        yield partial(self.notify, text, title="page written", timeout=15, markup=False)

    def _read_all(self, first: Listing | Literal["worse"] | None = None) -> Iterator[Callable[[], object] | None]:
        """Read the figures of the whole run, show the progress, and then list ``first``."""
        due, end = time.monotonic() + NOTE_SECONDS, ""
        try:
            for share in self.selection.index.extend():
                is_due = time.monotonic() > due
                due = time.monotonic() + NOTE_SECONDS if is_due else due
                note = f"{READING} {int(100 * share)} %"
                yield partial(self._noted, note) if is_due else None
        except CondenseError as error:
            end = fault(error)
        yield partial(self._noted, end)
        if first is not None:
            yield self.action_worse if first == "worse" else partial(self.find_where, first)

    @property
    def _so_far(self) -> str:
        return ", so far" if self.note.startswith(READING) else ""

    def _noted(self, note: str) -> None:
        """Show the batches and how much was read; of a live run that is followed, its newest step."""
        self.note = note
        self.batches = self.selection.index.batches()
        shown = [batch for batch in self.batches if batch.file == self.selection.file]
        self.selection.batch = shown[0] if shown else self.selection.batch  # its file was removed
        self.draw()
        beside = self._beside(self.selection.batch)
        newest = beside[-1] if beside else self.drawn
        if not self.live or self.listed is not None or newest == self.drawn:
            return
        same = newest.file == self.selection.file
        self._go(newest.file, record=self.selection.opened.record if same else None)

    def _poll(self) -> None:
        """Look for new files of a live run."""
        if self.live and not any(worker.group == "read" and worker.is_running for worker in self.workers):
            self.in_thread("read", self._read_all)


def run(
    index: Index,
    file: Path,
    choice: Choice,
    *,
    turn: int,
    first: Listing | Literal["worse"] | None,
) -> None:
    """Run the application, beginning with a file.

    Args:
        choice: names the trajectory of the file to begin with, or its group.
        first: what is listed first; None: the groups.
    """
    record = choice.named(index.batch(file).records())[0] if choice.is_named else None
    if isinstance(first, Listing):
        fields_in(first.where, first.sort, index.field_names())
        first = first._replace(first=record)
    InspectorApp(Selection(index, file, record), turn=turn, first=first).run()
