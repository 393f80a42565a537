"""What the inspector does beside the screen: indexing and searching, each in a thread."""

from functools import partial

from textual import work
from textual.worker import get_current_worker

from condensegrpo.cli.inspect_app import rows
from condensegrpo.cli.inspect_app.layout import InspectorLayout
from condensegrpo.cli.inspect_app.selection import fault
from condensegrpo.core.errors import CondenseError
from condensegrpo.inspection.views import MOST, Hit, search, select

HITS_AT_A_TIME = 50  # that a search shows at once


class InspectorThreads(InspectorLayout):
    """The layout with its threads; they show what they found through the event loop."""

    @work(thread=True, exclusive=True, group="search")
    def find_where(self, title: str, where: str, sort: str | None) -> None:
        """List the trajectories of all steps for which a condition holds."""
        try:
            found = select(self.selection.index.records(), where=where, sort=sort)
        except CondenseError as error:
            self.call_from_thread(partial(self.notify, fault(error), severity="error", markup=False))
            return
        more = f", the first {MOST}" if found.total > MOST else ""
        prompts = [rows.match_row(record) for record in found.records]
        if not get_current_worker().is_cancelled:
            self.call_from_thread(self.show_matches, f"{title}: {found.total}{more}", list(found.records), prompts)

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
    def index_all(self) -> None:
        """Index what is new in the whole run, and say how far it is."""
        worker = get_current_worker()
        shown = -1
        try:
            for progress in self.selection.index.extend():
                percent = 100 * progress.done // max(progress.total, 1)
                if worker.is_cancelled:
                    return
                if percent // 5 != shown:
                    shown = percent // 5
                    self.call_from_thread(self.noted, f"indexing {percent} %" if percent < 100 else "")
            self.call_from_thread(self.noted, "")
        except CondenseError as error:
            self.call_from_thread(self.noted, fault(error))

    def noted(self, note: str) -> None:
        """Say how far the index is."""
        changed, self.note = self.note != note, note
        if changed:
            self.selection.batch = self.selection.index.batch(self.selection.file)
            self.read_batches()
            self.draw()
