"""The lists on the left and in the middle, their rows, and the line at the top.

``Listed`` is a list of anything but groups: matches of a condition or a search, problems over the steps. The functions
that make one know nothing of the screen: they may take long and run in a thread.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.strip import Strip
from textual.widgets import OptionList

from condensegrpo.cli.inspect_app.selection import Listing
from condensegrpo.core.wording import plural
from condensegrpo.display import context_bar, theme
from condensegrpo.display.tables import advantage, verdict_text
from condensegrpo.display.theme import one_line
from condensegrpo.inspection import views
from condensegrpo.inspection.batches import TrajectoryBatch
from condensegrpo.inspection.index import Index, RecordKey
from condensegrpo.inspection.opened import OpenedTrajectory
from condensegrpo.inspection.records import Group, IndexedTrajectory
from condensegrpo.inspection.views import SuccessChange

BAR = 8  # cells of a bar of passes
STRIP = 14  # cells of a strip of turns
SPARKS = 12  # cells of a problem's sparkline
LONGEST = 200  # characters of a question
LONGEST_PROBLEM = 30  # characters of a name in a title
WORST = 200  # problems that are listed


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


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Values in [0, 1] as bars, the newest on the right; the mean of neighbours where there are more than fit."""
    if not values or width < 1:
        return ""
    size = max(1, -(-len(values) // width))
    line = ""
    for first in range(0, len(values), size):
        known = [value for value in values[first : first + size] if value is not None]
        line += "▁▂▃▄▅▆▇█"[min(7, int(8 * sum(known) / len(known)))] if known else " "
    return line


def top_line(batch: TrajectoryBatch, batches: Sequence[TrajectoryBatch], sparks: int, *, note: str) -> Text:
    """The batch that is shown, and success and groups without signal over the steps in ``sparks`` cells."""
    name = "training" if batch.evaluation is None else f"evaluation {one_line(batch.evaluation, 40)}"
    step = "" if batch.number is None else f" · step {batch.number}"
    text = Text.assemble(
        (f"{one_line(batch.run.name if batch.run else batch.file.name, 40)} ", "bold"), f"{name}{step}"
    )
    text.append(f" · {plural(batch.trajectories, 'trajectory', 'trajectories')}", theme.DIM)
    text.append(f"   {note}", theme.WARN)
    text.append("\nsuccess ", theme.DIM).append(sparkline([each.success for each in batches], sparks), theme.GOOD)
    text.append(f" {batch.success:.2f}")
    if any(each.signal is not None for each in batches):
        now = "–" if batch.no_signal_share is None else f"{batch.no_signal_share:.2f}"
        text.append("   groups without signal ", theme.DIM)
        text.append(sparkline([each.no_signal_share for each in batches], sparks), theme.HEAD).append(f" {now}")
    return text


def group_row(group: Group, name: str | None = None) -> Text:
    """Two lines: id or name, bar of passes and signal; question and ground truth."""
    filled = round(BAR * group.success)
    text = Text.assemble((f"{one_line(name or group.id, 30)} ", "bold"), ("█" * filled, theme.GOOD))
    text.append("░" * (BAR - filled), theme.FREE)
    passed = sum(sibling.figures.correct >= 1 for sibling in group.siblings)
    text.append(f" {passed}/{len(group.siblings)}")
    text.append(
        f"  ○ {group.exclusion}" if group.exclusion else "  ● signal" if group.signal else "",
        theme.WARN if group.exclusion else theme.HEAD,
    )
    question = one_line(group.question or group.problem, LONGEST)
    truth = "" if group.ground_truth is None else f" → {one_line(group.ground_truth, 40)}"
    return text.append(f"\n{question}{truth}", theme.DIM)


def match_row(record: IndexedTrajectory, note: str = "") -> Text:
    """Two lines: id, verdict and figures; what matched, or the question."""
    figures = record.figures
    text = Text.assemble((f"{one_line(figures.id, 30)} ", "bold"), verdict_text(figures)[:1], f" {figures.total:.2g}")
    if record.advantage is not None:
        text.append(" ").append_text(advantage(record, abs(record.advantage)))
    turns, stop = plural(figures.turns, "turn"), one_line(figures.stop, 20)
    text.append(f"  {figures.context_tokens} ctx  price {figures.price:.0f}  {turns}  {stop}", theme.DIM)
    return text.append(f"\n{one_line(note or record.question or figures.problem_id, LONGEST)}", theme.DIM)


def sibling_row(record: IndexedTrajectory) -> Text:
    """One line: sample, verdict, score, advantage, answer or stop, largest context, price and turns."""
    figures = record.figures
    text = Text.assemble(f"{figures.sample:>2} ", verdict_text(figures)[:1], f" {figures.total:.3f} ")
    if record.advantages is not None:
        text.append_text(advantage(record, abs(record.advantage or 0))).append(" ")
    text.append(one_line(figures.stop, 20) if record.answer is None else repr(one_line(record.answer, 16)))
    return text.append(
        f" {figures.context_tokens} ctx price {figures.price:.0f} {plural(figures.turns, 'turn')}", theme.DIM
    )


def change_row(change: SuccessChange, record: IndexedTrajectory) -> Text:
    """Two lines: the success on a problem before and after; its visits and the question."""
    text = Text.assemble((f"{change.before:.2f} → {change.after:.2f} ", f"bold {theme.BAD}"))
    text.append(sparkline([visit.success for visit in change.visits], SPARKS), theme.GOOD)
    text.append(f"  {one_line(change.evaluation or 'training', 30)}, {len(change.visits)} times", theme.DIM)
    question = "" if record.question is None else f"  {record.question}"
    return text.append(f"\n{one_line(f'{change.problem}{question}', LONGEST)}", theme.DIM)


def turn_row(opened: OpenedTrajectory, turn: int) -> Text:
    """One line: the turn, its tokens, its advantage, and the strip of what its prompt keeps of the turns before it."""
    view, units = opened.turns[turn], len(opened.turns)
    whole = f"/{view.context.tokens + view.context.saved}" if view.context.saved else ""
    text = Text.assemble(f"{turn:>3} ", (f"{view.context.tokens}{whole} ctx".ljust(10), theme.DIM), " ")
    if view.advantage is not None:
        text.append(f"{view.advantage:+.2f} ", theme.signed_style(view.advantage, abs(view.advantage)))
    columns = units if units <= STRIP else max(STRIP, turn + 1)  # the newest of many
    text.append_text(context_bar.strip(view.context, columns, STRIP))
    return text if view.kind == "act" else text.append(f" {view.kind}", theme.REWRITTEN)


class Listed(NamedTuple):
    """Trajectories of any steps, with their rows."""

    title: str
    records: Sequence[IndexedTrajectory]
    rows: Sequence[Text]
    listing: Listing | None = None  # the condition that they match, if it was one


def matching(index: Index, listing: Listing, so_far: str) -> Listed:
    """The trajectories for which a condition holds; ``so_far`` follows their number while the run is read."""
    batch = None if listing.file is None else index.batch(listing.file)
    matches = views.find(index, batch, where=listing.where, sort=listing.sort)
    more = f", the first {views.MOST:,}" if matches.total > views.MOST else ""
    title = f"{listing.title}: {matches.total:,}{more}{so_far}"
    if not matches.total:
        title += f". No trajectory has {listing.where}; the open one stays"
    return Listed(title, matches.records, [match_row(record) for record in matches.records], listing)


def worse(index: Index, so_far: str) -> Listed:
    """The problems that got worse, each by its least correct trajectory of the last visit."""
    changes = views.got_worse(index)
    last = [(change, change.visits[-1]) for change in changes[:WORST]]
    listed = [(change, index.at(RecordKey(visit.batch.file, visit.worst))) for change, visit in last]
    title = f"{plural(len(changes), 'problem')} got worse: first half of the steps → last half{so_far}"
    return Listed(title, [record for _, record in listed], [change_row(*pair) for pair in listed])


def visits(index: Index, problem: str) -> Listed:
    """The groups of a problem in all steps."""
    followed = index.follow(problem)
    line = sparkline([group.success for _, group in followed], SPARKS)
    drawn = [group_row(group, f"{batch.evaluation or 'step'} {batch.number}") for batch, group in followed]
    return Listed(f"{one_line(problem, LONGEST_PROBLEM)} {line}", [group.siblings[0] for _, group in followed], drawn)


def hits(query: str, found: Sequence[views.Hit], more: str) -> Listed:
    """The hits of a search; ``more`` follows their number."""
    drawn = [
        match_row(hit.record, hit.excerpt if hit.turn is None else f"turn {hit.turn}: {hit.excerpt}") for hit in found
    ]
    most = "+" if len(found) == views.MOST else ""  # where a search stops
    return Listed(f"{query!r}: {len(found):,}{most}{more}", [hit.record for hit in found], drawn)
