"""Draws the application of ``condensegrpo inspect``: the line at the top, the rows of lists, the tabs of a turn.

Every distinction has a glyph or a word beside its colour.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from condensegrpo.core.messages import Message
from condensegrpo.core.trajectory import SpanStatus
from condensegrpo.core.wording import plural, ranges
from condensegrpo.display import context_bar, theme
from condensegrpo.display.context_bar import Mark
from condensegrpo.display.tables import advantage, verdict_text
from condensegrpo.display.theme import neutral, one_line
from condensegrpo.display.trajectory_view import SURPRISING, TerminalPicture, token_grid
from condensegrpo.inspection.history import HistoryPiece, PieceStatus, WordChange, word_changes
from condensegrpo.inspection.index import OpenedTrajectory, TrajectoryBatch
from condensegrpo.inspection.panes import TokenView, TurnView, raw_turn
from condensegrpo.inspection.pictures import media_of
from condensegrpo.inspection.records import Group, IndexedTrajectory
from condensegrpo.inspection.views import SuccessChange

BAR = 8  # cells of a bar of passes
STRIP = 14  # cells of a strip of turns
SPARKS = 12  # cells of a problem's sparkline
LONGEST = 200  # characters of a question
LONGEST_PROBLEM = 30  # characters of a name in a title
TABS = ("shown", "full", "reply", "credit", "raw")
MOST = 200_000  # characters of a tab
MARKS = {
    PieceStatus.PINNED: context_bar.PINNED,
    PieceStatus.KEPT: context_bar.KEPT,
    PieceStatus.DROPPED: context_bar.DROPPED,
    PieceStatus.REWRITTEN: context_bar.REWRITTEN,
    PieceStatus.ADDED: Mark("+", theme.REWRITTEN, "added"),
}
CHANGES = {
    WordChange.SAME: "",
    WordChange.REMOVED: "dim strike",
    WordChange.INSERTED: f"bold underline {theme.REWRITTEN}",
}
PALE, DEEP = (30, 30, 36), (120, 70, 140)  # backgrounds of a token that was certain, and of one that surprised
DEEPEST = 4.0  # nats


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


def tab_content(tab: str, opened: OpenedTrajectory, turn: int, group: Group, *, ids: bool) -> RenderableType:
    """The content of a tab for a turn; ``ids``: the reply with the ids of its tokens."""
    if not opened.turns:
        return Text(neutral(opened.scored.trajectory.detail) or "no turn was sampled")
    match tab:
        case "full":
            return full(opened, turn)
        case "reply":
            return reply(opened, turn, ids=ids)
        case "credit":
            return credit(opened, turn, group)
        case "raw":
            text = raw_turn(opened.record, turn)
            more = f"\n… {len(text) - MOST} more characters" if len(text) > MOST else ""
            return Text(f"{neutral(text[:MOST])}{more}")
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
    head = Text.assemble((sentence, "bold"))
    declared = next((view.condensation for view in opened.turns[turn::-1] if view.condensation is not None), None)
    if declared is not None:
        why = one_line(declared.reason, MOST) or "not stated"
        head.append(f"\n{one_line(declared.condenser, 30)}: {why}")
    return Lines(head, context_bar.words_of(*MARKS.values()), *map(_piece, opened.pieces(turn)))


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
