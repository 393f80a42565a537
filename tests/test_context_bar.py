from builders import condensation, ledger_episode, trajectory, turn
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from condensegrpo.core.messages import Message
from condensegrpo.core.trajectory import SpanStatus, Trajectory
from condensegrpo.display.context_bar import bar, cell_width, legend, ruler, shares, strip
from condensegrpo.inspection.panes import context_views, newest_messages

# pinned messages of 9 tokens; each unit is a reply of 3 + 2 and an operation of 1 + 2
REPLIES = ["<note> 3 </note>", "<note> 5 </note>", "<note> 6 </note>", "<answer> 6 </answer>"]
OPERATIONS = ["+2", "+1", "done report"]


def test_a_history_that_is_never_condensed_only_grows() -> None:
    views = context_views(ledger_episode(REPLIES, OPERATIONS), budget=48)
    assert [view.tokens for view in views] == [9, 17, 25, 34]
    assert [view.pinned for view in views] == [9, 9, 9, 9]
    assert [view.newest for view in views] == [0, 4, 4, 5]  # <user> +1 <end> <assistant>
    assert [view.kept for view in views] == [0, 4, 12, 20]
    assert [view.saved for view in views] == [0, 0, 0, 0]
    assert [view.free for view in views] == [39, 31, 23, 14]
    assert list(views[3].statuses.values()) == [SpanStatus.KEPT] * 3


def test_a_condensed_history_says_what_is_left_and_what_was_saved() -> None:
    views = context_views(ledger_episode(REPLIES, OPERATIONS, keep_last=1), budget=48)
    assert [view.tokens for view in views] == [9, 17, 17, 18]
    assert [view.saved for view in views] == [0, 0, 8, 16]
    assert [(view.pinned, view.kept, view.newest, view.rewritten) for view in views[2:]] == [(9, 4, 4, 0), (9, 4, 5, 0)]
    assert list(views[3].statuses.values()) == [SpanStatus.DROPPED, SpanStatus.DROPPED, SpanStatus.KEPT]


def test_what_stands_for_rewritten_units_is_told_apart() -> None:
    """Head 4; units of 10 and 6; the first was rewritten to 3: 4 + 3 + 6 = 13; of the last unit 2 were sampled."""
    declared = condensation("rk", [10, 6], before=20, after=13)
    views = context_views(
        trajectory(turn([1] * 4, [2] * 2), turn([1] * 14, [2] * 2), turn([7] * 13, [2], condensation=declared)),
        budget=20,
    )
    last = views[2]
    assert (last.pinned, last.rewritten, last.kept, last.newest, last.saved, last.free) == (4, 3, 2, 4, 7, 7)


def test_a_condensation_that_lengthened_a_prompt_is_marked() -> None:
    declared = condensation("r", [10], before=14, after=20)
    views = context_views(
        trajectory(turn([1] * 4, [2] * 3), turn([9] * 20, [2] * 2, condensation=declared), turn([9] * 25, [2])),
        budget=30,
    )
    assert [strip(view, 3).plain for view in views] == ["▸", "▒▒ ▸ +6", "▒▒ ■■ ▸"]
    assert [view.grown for view in views] == [0, 6, 0]


def test_the_prompt_after_a_condensation_goes_on_from_it() -> None:
    declared = condensation("d", [10], before=14, after=6)
    views = context_views(
        trajectory(turn([1] * 4, [2] * 3), turn([9] * 6, [2] * 2, condensation=declared), turn([9] * 11, [2])),
        budget=20,
    )
    assert list(views[2].statuses.values()) == [SpanStatus.DROPPED, SpanStatus.KEPT]
    assert (views[2].pinned, views[2].rewritten, views[2].newest, views[2].kept, views[2].saved) == (4, 2, 3, 2, 8)


def test_the_newest_messages_are_those_after_the_last_reply() -> None:
    said = [Message(role=role, content=role) for role in ("user", "assistant", "tool", "user")]
    assert [message.role for message in newest_messages(said)] == ["tool", "user"]
    assert newest_messages(said[:1]) == ()


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Prompts of any length, condensed or not, honest declarations or not: a damaged file must still be shown."""
    turns = []
    for index in range(draw(st.integers(0, 5))):
        tokens = draw(st.integers(1, 60))
        declared = None
        if index and draw(st.booleans()):
            statuses = "".join(draw(st.lists(st.sampled_from("kdr"), min_size=index, max_size=index)))
            sizes = draw(st.lists(st.integers(0, 40), min_size=index, max_size=index))
            declared = condensation(statuses, sizes, before=draw(st.integers(0, 200)), after=tokens)
        turns.append(turn([1] * tokens, [2] * draw(st.integers(0, 9)), condensation=declared))
    return trajectory(*turns)


@settings(max_examples=100)
@given(trajectories(), st.integers(0, 80))
def test_the_parts_of_a_context_add_up_to_its_prompt(one: Trajectory, budget: int) -> None:
    for view, each in zip(context_views(one, budget), one.turns, strict=True):
        parts = (view.pinned, view.kept, view.rewritten, view.newest)
        assert sum(parts) == len(each.prompt_ids)
        assert min(*parts, view.saved, view.free) >= 0
        assert len(bar(view, 30).plain) == 30
        assert len(view.statuses) == view.turn


@settings(max_examples=100)
@given(st.lists(st.integers(0, 5000), min_size=6, max_size=6), st.integers(6, 60))
def test_shares_fill_the_bar_and_show_every_part(amounts: list[int], width: int) -> None:
    cells = shares(amounts, width)
    assert sum(cells) == (width if sum(amounts) else 0)
    assert all((count > 0) == (amount > 0) for count, amount in zip(cells, amounts, strict=True))


def test_a_bar_drawn_by_hand() -> None:
    views = context_views(ledger_episode(REPLIES, OPERATIONS, keep_last=1), budget=34)
    assert bar(views[0], 34).plain == "█" * 9 + "·" * 25
    assert bar(views[2], 34).plain == "█" * 9 + "■" * 4 + "◆" * 4 + "░" * 8 + "·" * 9
    assert bar(views[3], 34).plain == "█" * 9 + "■" * 4 + "◆" * 5 + "░" * 16
    tight = context_views(ledger_episode(REPLIES, OPERATIONS, keep_last=1), budget=20)
    assert bar(tight[3], 20).plain == "█" * 9 + "■" * 4 + "◆" * 5 + "░»"


def test_a_strip_drawn_by_hand() -> None:
    views = context_views(ledger_episode(REPLIES, OPERATIONS, keep_last=1), budget=34)
    assert [strip(view, 4).plain for view in views] == ["▸", "■■ ▸", "░░ ■■ ▸", "░░ ░░ ■■ ▸"]
    assert ruler(4).plain == "0  1  2  3"


def test_a_long_strip_takes_less_room_and_shows_the_newest() -> None:
    assert [cell_width(units) for units in (13, 14, 20, 21, 99)] == [3, 2, 2, 1, 1]
    long = ledger_episode(["<note> 3 </note>"] * 60, ["+1"] * 60, keep_last=2)
    views = context_views(long, budget=100)
    assert strip(views[59], 60).plain == "…" + "░" * 37 + "■■▸"
    assert strip(views[5], 60).plain == "…▸"
    assert ruler(60).plain.split() == ["20", "25", "30", "35", "40", "45", "50", "55"]


def test_every_mark_stands_in_the_legend_whole_with_its_word() -> None:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(legend(64))
    assert capture.get().splitlines() == [
        "█ pinned   ■ kept   ▒ rewritten   ◆ newest observation   ░ dropped",
        "· free, of 64 tokens",
    ]
