"""``condensegrpo inspect`` on a terminal: the keys of the application."""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal

from textual.binding import Binding, BindingType
from textual.widgets import Input, OptionList, TabbedContent
from textual.widgets.option_list import Option

from condensegrpo.cli.inspect_app import rows
from condensegrpo.cli.inspect_app.dialogs import CompareDialog, KeysDialog, ViewsDialog
from condensegrpo.cli.inspect_app.layout import TABS
from condensegrpo.cli.inspect_app.selection import Listing, Selection, fault, sparkline
from condensegrpo.cli.inspect_app.threads import InspectorThreads
from condensegrpo.cli.inspect_choice import Choice
from condensegrpo.core.errors import CondenseError
from condensegrpo.display.neutral import neutral, one_line
from condensegrpo.inspection.index import Index
from condensegrpo.inspection.records import TrajectoryRecord
from condensegrpo.inspection.views import READY_VIEWS, select

POLL_SECONDS = 2.0  # between looks at a live run
LONGEST_PROBLEM = 30  # characters of a name in a title
KEYS: list[BindingType] = [  # those in the line at the bottom first, the most needed ones at its left
    Binding("question_mark", "keys", "help", key_display="?"),
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
    Binding("q", "quit", "quit"),
    Binding("t", "ids", "ids", show=False),
    Binding("escape", "groups", show=False),
]


class InspectorApp(InspectorThreads):
    """The application: keys and the mouse move the ``Selection``."""

    BINDINGS: ClassVar[list[BindingType]] = KEYS

    def __init__(
        self,
        selection: Selection,
        *,
        record: TrajectoryRecord | None = None,
        turn: int = 0,
        first: Listing | Literal["worse"] | None = None,
    ) -> None:
        """An application that begins with a place.

        Args:
            record: the trajectory that is shown first; None: the first of a group with a signal.
            first: what is listed first, ``worse`` for the problems that got worse; None: the groups.
        """
        super().__init__(selection)
        self._record, self._turn, self._first = record, turn, first

    def on_mount(self) -> None:
        """Show the batch that was opened; the rest is indexed behind it."""
        self.title = "condensegrpo inspect"
        self.show_groups(self._record, self._turn)
        self.query_one("#list").focus()
        if self.selection.index.note:
            self.notify(neutral(self.selection.index.note), markup=False)
        self.set_interval(POLL_SECONDS, self._poll)
        self.index_all(self._first)

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Show what was chosen by the arrow keys or the mouse."""
        place, group = event.option_index, self.selection.group
        match event.option_list.id:
            case "list" if self.listed is not None:
                self.show(self.listed[place])
            case "list":
                if place == len(self.selection.groups) - 1 and self.selection.more_groups():
                    added = self.selection.groups[place + 1 :]
                    event.option_list.add_options(Option(rows.group_row(each)) for each in added)
                self.show(self.selection.groups[place].siblings[0])
            case "siblings" if group is not None:
                self.show(group.siblings[place], self.selection.turn)
            case "turns" if self.selection.opened is not None:
                self.show_turn(place)

    def show_turn(self, turn: int) -> None:
        """Go to a turn."""
        if self.selection.opened is not None:
            self.selection.show(self.selection.opened.record, turn)
            self.draw()

    def action_turn(self, by: int) -> None:
        """Go to another turn."""
        self.show_turn(self.selection.turn + by)

    def action_sibling(self, by: int) -> None:
        """Go to another sibling, at the same turn."""
        sibling = self.selection.sibling(by)
        if sibling is not None:
            self.show(sibling, self.selection.turn)

    def action_step(self, by: int) -> None:
        """Go to another step."""
        self._go(lambda: self.selection.step(by), "there is no further step")

    def action_kind(self) -> None:
        """Go to the evaluations, or back to training."""
        self._go(self.selection.other_kind, "there are no evaluations beside these trajectories")

    def _go(self, move: Callable[[], bool], otherwise: str, record: TrajectoryRecord | None = None) -> None:
        try:
            if move():
                self.show_groups(record, self.selection.turn if record is not None else 0)
            else:
                self.notify(otherwise)
        except CondenseError as error:
            self.notify(fault(error), severity="error", markup=False)

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
        opened = self.selection.opened
        if self.listed is not None and opened is not None:
            self._go(lambda: self.selection.go_to(opened.record.place.file), "", opened.record)
        self.query_one("#list").focus()

    def action_copy(self) -> None:
        """Copy the command that shows this."""
        command = self.selection.command(self.listing)
        self.copy_to_clipboard(command)
        self.notify(neutral(command), title="copied", markup=False)

    def action_problem(self) -> None:
        """List the groups of this problem in all steps."""
        if self.selection.opened is None:
            return
        problem = self.selection.opened.record.problem
        followed = self.selection.index.follow(problem)
        labels = [f"{batch.evaluation or 'step'} {batch.number}" for batch, _ in followed]
        line = sparkline([group.success for _, group in followed], rows.SPARKS)
        prompts = [rows.group_row(group, label) for label, (_, group) in zip(labels, followed, strict=True)]
        self.show_matches(
            f"{one_line(problem, LONGEST_PROBLEM)} {line}", [group.siblings[0] for _, group in followed], prompts
        )

    def action_worse(self) -> None:
        """List the problems that got worse."""
        self.find_worse()

    def action_export(self) -> None:
        """Write what is shown as a page for somebody else."""
        self.notify("writing a page")
        self.export()

    def action_compare(self) -> None:
        """Compare with another sibling."""
        opened, group = self.selection.opened, self.selection.group
        if opened is None or group is None or len(group.siblings) < 2:
            self.notify("it has no sibling")
            return
        names = [sibling.id for sibling in group.siblings]
        own = names.index(opened.record.id)
        self.push_screen(
            CompareDialog(opened, lambda by: self.selection.read(group.siblings[(own + by) % len(names)], group))
        )

    def action_keys(self) -> None:
        """Show the keys."""
        self.push_screen(KeysDialog())

    def action_live(self) -> None:
        """Follow a live run: show its newest step, and each that comes."""
        self.live = not self.live
        if self.live and self.selection.files:
            self._go(lambda: self.selection.go_to(self.selection.files[-1]), "")
        self.draw()

    def _poll(self) -> None:
        """Look for what a live run wrote since."""
        if self.live and not any(worker.group == "index" and worker.is_running for worker in self.workers):
            self.index_all()

    def noted(self, note: str) -> None:
        """Show what is indexed; of a live run that is followed, its newest step as far as it is."""
        super().noted(note)
        newest, opened = self.batches[-1] if self.batches else self.drawn, self.selection.opened
        if not self.live or self.listed is not None or newest == self.drawn:
            return
        same = newest.file == self.selection.file and opened is not None
        self._go(lambda: self.selection.go_to(newest.file), "", opened.record if same and opened else None)

    def action_views(self) -> None:
        """Choose a ready view."""
        self.push_screen(ViewsDialog(), self._show_view)

    def _show_view(self, number: int | None) -> None:
        if number is not None:
            view = READY_VIEWS[number]
            self.find_where(Listing(view.title, view.where, view.sort, ("--view", view.name)))

    def action_search(self) -> None:
        """Ask what to search for."""
        field = self.query_one("#search", Input)
        field.display = True
        field.value = ""
        field.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Search for a text, or for a condition behind a =."""
        event.input.display = False
        query = event.value.strip()
        if query.startswith("="):
            where = query.removeprefix("=").strip()
            self.find_where(Listing(where, where, None, ("--where", where)))
        elif query:
            self.find_text(query)


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

    Raises:
        CondenseError: the file holds nothing or is damaged, there is no such trajectory, or a condition cannot be read.
    """
    selection, record = Selection(index, file), None
    if choice.is_named:
        index.update([file])
        selection.go_to(file)
        record = choice.named(tuple(index.records(selection.batch)))[0]
    if isinstance(first, Listing):
        select((), where=first.where, sort=first.sort)
        first = first._replace(first=record)
    InspectorApp(selection, record=record, turn=turn, first=first).run()
    index.close()
