"""What the inspector does beside the screen: indexing and searching, each in a thread."""

import re
import time
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlencode

from textual import work
from textual.worker import get_current_worker

from condensegrpo.cli.inspect_app import rows
from condensegrpo.cli.inspect_app.layout import InspectorLayout
from condensegrpo.cli.inspect_app.selection import Listing, fault
from condensegrpo.core.errors import CondenseError
from condensegrpo.core.wording import counted
from condensegrpo.inspection.records import LinePlace, TrajectoryRecord
from condensegrpo.inspection.views import MOST, Hit, find, got_worse, search

NOTE_SECONDS = 0.5  # between notes of how far the index is
INDEXING = "indexing"  # begins the note of how far the index is
HITS_AT_A_TIME = 50  # that a search shows at once
WORST = 200  # problems that are listed
MEGABYTE = 10**6
COMFORTABLE = 30 * MEGABYTE  # of stored lines in a page


class InspectorThreads(InspectorLayout):
    """The layout with its threads; they show what they found through the event loop."""

    @work(thread=True, exclusive=True, group="search")
    def find_where(self, listing: Listing) -> None:
        """List the trajectories for which a condition holds."""
        index = self.selection.index
        try:
            batch = None if listing.file is None else index.batch(listing.file)
            found = find(index, batch, where=listing.where, sort=listing.sort)
        except CondenseError as error:
            self.call_from_thread(partial(self.notify, fault(error), severity="error", markup=False))
            return
        more = f", the first {MOST}" if found.total > MOST else ""
        prompts = [rows.match_row(record) for record in found.records]
        if not get_current_worker().is_cancelled:
            title = f"{listing.title}: {found.total}{more}{self._so_far}"
            if not found.total:
                title += f". No trajectory has {listing.where}; the open one stays"
            self.call_from_thread(self.show_matches, title, list(found.records), prompts, listing)

    @work(thread=True, exclusive=True, group="search")
    def find_worse(self) -> None:
        """List the problems that got worse, each by its least correct trajectory of the last visit."""
        index = self.selection.index
        changes = got_worse(index)
        last = [(change, change.visits[-1]) for change in changes[:WORST]]
        worst = [(change, index.at(visit.batch, visit.worst)) for change, visit in last]
        listed = [(change, record) for change, record in worst if record is not None]
        title = f"{counted(len(changes), 'problem', 'problems')} got worse: first half of the steps → last half"
        title += self._so_far
        prompts = [rows.change_row(*each) for each in listed]
        if not get_current_worker().is_cancelled:
            self.call_from_thread(self.show_matches, title, [record for _, record in listed], prompts)

    @work(thread=True, exclusive=True, group="export")
    def export(self) -> None:
        """Write a page of what is listed and of the open group, as far as a browser opens it at once."""
        from condensegrpo.inspection.inspector_page import write_inspector

        opened, group, index = self.selection.opened, self.selection.group, self.selection.index
        if opened is None or group is None:
            return
        listed = [*(index.records(self.selection.batch) if self.listed is None else self.listed)]
        if sum(record.place.size for record in listed) > COMFORTABLE:
            listed = []
        chosen: dict[Path, dict[LinePlace, TrajectoryRecord]] = {}
        for record in (*listed, *group.siblings):
            chosen.setdefault(record.place.file, {})[record.place] = record
        name = re.sub(r"[^\w.-]+", "-", opened.record.id)
        page = Path(f"inspect-{index.path.resolve().stem}-{name}.html")
        batches = [(batch, [*chosen[batch.file].values()]) for batch in index.batches() if batch.file in chosen]
        try:
            size = write_inspector(page, index, batches)
        except CondenseError as error:
            self.call_from_thread(partial(self.notify, fault(error), severity="error", markup=False))
            return
        many = counted(sum(map(len, chosen.values())), "trajectory", "trajectories")
        place = {
            "step": opened.batch.number,
            "evaluation": opened.batch.evaluation,
            "t": opened.record.id,
            "turn": self.selection.turn,
        }
        address = urlencode({key: value for key, value in place.items() if value is not None}, safe="/")
        text = f"{page.absolute()}: {many}, {size / MEGABYTE:.1f} MB. With #{address} behind its address it opens here."
        self.call_from_thread(partial(self.notify, text, title="page written", timeout=15, markup=False))

    @work(thread=True, exclusive=True, group="search")
    def find_text(self, query: str) -> None:
        """List the trajectories of all steps that a search finds, as they are found."""
        hits: list[Hit] = []
        worker = get_current_worker()
        try:
            for hit in search(self.selection.index, query):
                hits.append(hit)
                if worker.is_cancelled:
                    return
                if len(hits) in (1, HITS_AT_A_TIME):
                    self.call_from_thread(self._show_hits, query, list(hits), " …")
                if len(hits) == MOST:
                    break
        except CondenseError as error:
            self.call_from_thread(partial(self.notify, fault(error), severity="error", markup=False))
        self.call_from_thread(self._show_hits, query, hits, "")

    def _show_hits(self, query: str, hits: list[Hit], more: str) -> None:
        prompts = [
            rows.match_row(hit.record, hit.excerpt if hit.turn is None else f"turn {hit.turn}: {hit.excerpt}")
            for hit in hits
        ]
        self.show_matches(f"{query!r}: {len(hits)}{more}", [hit.record for hit in hits], prompts)

    @work(thread=True, exclusive=True, group="index")
    def index_all(self, first: Listing | Literal["worse"] | None = None) -> None:
        """Index what is new in the whole run, say how far it is, and then list what is to be shown ``first``."""
        worker, due = get_current_worker(), time.monotonic() + NOTE_SECONDS
        try:
            for progress in self.selection.index.extend():
                if worker.is_cancelled:
                    return
                if time.monotonic() > due:
                    percent = 100 * progress.done // max(progress.total, 1)
                    self.call_from_thread(self.noted, f"{INDEXING} {percent} %")
                    due = time.monotonic() + NOTE_SECONDS
            self.call_from_thread(self.noted, "")
        except CondenseError as error:
            self.call_from_thread(self.noted, fault(error))
        if first is not None:
            self.call_from_thread(self.find_worse if first == "worse" else partial(self.find_where, first))

    @property
    def _so_far(self) -> str:
        return ", so far" if self.note.startswith(INDEXING) else ""

    def noted(self, note: str) -> None:
        """Show what is indexed, and how far the index is."""
        self.note = note
        self.read_batches()
        shown = [batch for batch in self.batches if batch.file == self.selection.file]
        self.selection.batch = shown[0] if shown else self.selection.batch  # its file was removed
        self.draw()
