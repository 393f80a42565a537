"""Condensers whose view the policy decides: what stays, what a wrong call is told, and that the spans say so."""

import asyncio
import re
import tempfile
from pathlib import Path
from typing import Literal

import pytest
from conformance import PINNED, condense, statuses
from deciding import ASKING, SUMMARY, answers, build, call, deciding, past, played, stages, template, view
from hypothesis import given, settings
from hypothesis import strategies as st
from talk import Counting, problem, tokenizer

from condensegrpo.algorithms.segments import broken_invariants
from condensegrpo.core.condenser import Condenser
from condensegrpo.core.messages import without_meter
from condensegrpo.core.trajectory import SpanStatus, StopReason, Trajectory
from condensegrpo.episodes.episode import run_episode
from condensegrpo.episodes.render import Renderer
from condensegrpo.episodes.settings import CondenseSettings
from condensegrpo.metrics.trajectories import fetches

# --- fold -------------------------------------------------------------------------------------------------------------

LONG = "look " + "." * 120
OPEN, BACK = call("branch", description="look up Ben"), call("return", message="Ben has 12")


def test_what_lies_between_branch_and_return_leaves_the_view_and_both_calls_stay() -> None:
    one = played(build("fold"), "look 0", OPEN, "look 2", "look 3", BACK, "look 5")
    assert view(one, 4) == ["look 0", OPEN, "look 2", "look 3"]
    assert view(one, 5) == ["look 0", OPEN, BACK]
    declared = one.turns[5].condensation
    assert declared is not None
    assert [(span.first, span.last, span.status.value) for span in declared.spans] == [
        (0, 1, "kept"),
        (2, 3, "dropped"),
        (4, 4, "kept"),
    ]
    assert declared.reason == "folded turns 2–3 by the policy's return in turn 4"
    assert [turn.condensation is None for turn in one.turns] == [True] * 5 + [False, True]  # continued by ids
    assert view(one, 6) == ["look 0", OPEN, BACK, "look 5"]


def test_a_second_branch_folds_too_and_the_first_stays_folded() -> None:
    one = played(build("fold"), OPEN, "look 1", BACK, OPEN, "look 4", "look 5", BACK)
    assert view(one, 7) == [OPEN, BACK, OPEN, BACK]
    declared = one.turns[7].condensation
    assert declared is not None
    assert declared.reason == "folded turns 4–5 by the policy's return in turn 6, and 1 turn before"


@pytest.mark.parametrize(
    ("replies", "turn", "words"),
    [
        ([BACK], 0, "no branch is open; open one with branch"),
        ([OPEN, OPEN], 1, "the branch of turn 0 is open, and branches are not nested; return from it first"),
        ([OPEN, BACK], 1, "nothing to fold: no turn lies between this one and the branch of turn 0"),
        ([OPEN, "look", BACK, BACK], 3, "no branch is open: turn 1 was folded in turn 2 already"),
        ([call("branch", description=" ")], 0, "description is ' ', wanted a text that is not blank"),
        ([call("branch")], 0, "missing a required argument: 'description'"),
    ],
)
def test_a_wrong_branch_or_return_is_an_observation_and_changes_nothing(
    replies: list[str], turn: int, words: str
) -> None:
    one = played(build("fold"), *replies, "look")
    assert words in answers(one, turn)
    assert answers(one, turn).startswith("<result>Error: ")
    assert view(one, turn + 1)[-1] == replies[-1]
    assert one.turns[turn].tool_successes == 0


def test_a_call_in_a_summary_is_text() -> None:
    with tempfile.TemporaryDirectory() as folder:
        both = stages("fold", ("compact", {"template": template(Path(folder))}))
        one = played(both, LONG, LONG, call("compact"), "look", BACK)
    assert [turn.kind for turn in one.turns] == ["act"] * 3 + ["condense"] + ["act"] * 3
    assert "no branch is open" in answers(one, 5)
    assert view(one, 4) == [SUMMARY, call("compact")]


# --- prune ------------------------------------------------------------------------------------------------------------


def test_named_turns_are_dropped_or_replaced_by_a_note() -> None:
    one = played(build("prune"), "look 0", "look 1", call("prune", turns=[1]), call("prune", turns=[0], note="zero"))
    assert view(one, 3) == ["look 0", call("prune", turns=[1])]
    assert view(one, 4) == ["zero", call("prune", turns=[1]), call("prune", turns=[0], note="zero")]
    note = one.turns[4].context[3].text
    assert re.fullmatch(r"\[turns up to 0 omitted, replaced by your note above: \d+ tokens\]", note)
    declared = one.turns[4].condensation
    assert declared is not None
    assert [(span.first, span.status.value) for span in declared.spans] == [
        (0, "rewritten"),
        (1, "dropped"),
        (2, "kept"),
    ]


def test_a_note_can_be_pruned_with_more_turns_and_then_stands_for_all_of_them() -> None:
    first, second = ("prune", {"turns": [0, 1], "note": "a"}), ("prune", {"turns": [1, 3], "note": "b"})
    history = past(build("prune"), None, None, first, None, second)
    found = condense(build("prune"), history, 10_000)
    assert [unit.reply.text for unit in found.units] == [call("prune", **first[1]), "b", call("prune", **second[1])]
    assert "[turns up to 3 omitted" in found.units[1].results[0].text
    assert statuses(history, found) == "ddkrk"


def test_a_note_can_only_be_replaced_by_a_shorter_one() -> None:
    calls = [("prune", {"turns": [0], "note": note}) for note in ("four", "five5", "two")]
    history = past(build("prune"), None, *calls)
    assert "at most 3 are allowed here" in history.units[2].results[0].text
    found = condense(build("prune"), history, 10_000)
    assert found.units[0].reply.text == "two"
    assert found.reason == "pruned turn 0 by the policy's call in turn 3"


def test_the_question_cannot_be_pruned_nor_the_call_itself() -> None:
    first = call("prune", turns=[0])
    one = played(build("prune"), first, call("prune", turns=[0, 1]), call("prune", turns=[-1]), first)
    assert "there is no turn 0; the turns so far: none" in answers(one, 0)
    assert "there is no turn 1; the turns so far: 0" in answers(one, 1)
    assert "there is no turn -1" in answers(one, 2)
    assert one.turns[4].context[:2] == one.turns[0].context[:2]
    assert view(one, 4)[-1] == call("prune", turns=[0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"turns": [0]}, "turn 0 is not in your context any more; in it are 1–2"),
        ({"turns": []}, r"turns is \[\], wanted numbers of turns"),
        ({"turns": "1"}, "argument 'turns' is \"1\": Input should be a valid array"),
        ({"turns": [True]}, r"argument 'turns' is \[true\]: Input should be a valid integer"),
        ({"turns": [1], "note": ""}, "note is '', wanted a text"),
        ({"turns": [1], "note": "n" * 401}, "the note has 401 characters, and at most"),
        ({"turns": [1], "note": "n" * 80}, "the note has 80 characters, and at most 5[0-9] are allowed here"),
    ],
)
def test_a_wrong_prune_is_told_what_is_wrong(arguments: dict[str, object], words: str) -> None:
    history = past(build("prune"), None, None, ("prune", {"turns": [0]}), ("prune", arguments))
    assert re.search(words, history.units[3].results[0].text)
    assert statuses(history, condense(build("prune"), history, 10_000)) == "dkkk"


# --- compact ----------------------------------------------------------------------------------------------------------


def test_the_policy_asks_for_a_summary_and_writes_it_in_a_condense_turn(tmp_path: Path) -> None:
    one = played(build("compact", template=template(tmp_path)), LONG, LONG, call("compact"), "look 4")
    assert [turn.kind for turn in one.turns] == ["act", "act", "act", "condense", "act", "act"]
    assert ASKING in one.turns[3].context[-1].text
    assert view(one, 4) == [SUMMARY, call("compact")]
    assert view(one, 5) == [SUMMARY, call("compact"), "look 4"]


def test_compact_is_refused_where_every_turn_would_stay_verbatim(tmp_path: Path) -> None:
    one = played(
        build("compact", template=template(tmp_path), keep_last=3), LONG, *[LONG + call("compact")] * 3, "look 4"
    )
    refused = "there are 2 turns to summarise, and at least 3 are needed"
    assert [refused in answers(one, turn) for turn in (2, 3)] == [True, False]
    assert "You are asked for a summary next." in answers(one, 3)
    assert one.turns[4].kind == "condense"


def test_compact_in_every_turn_is_refused(tmp_path: Path) -> None:
    replies = [LONG, *[LONG + call("compact")] * 5]
    one = played(build("compact", template=template(tmp_path)), *replies)
    told = [without_meter(answers(one, turn)) for turn in range(1, 8) if one.turns[turn].kind == "act"]
    assert "there is 1 turn to summarise, and at least 2 are needed" in told[0]
    assert [text == "<result>You are asked for a summary next.</result>" for text in told] == [
        False,
        True,
        False,
        True,
        False,
    ]
    assert "since the last summary there is 1 turn to summarise" in told[2]


def test_without_a_call_a_summary_is_written_only_over_budget(tmp_path: Path) -> None:
    history = past(build("compact"), *[None] * 6)
    found = [
        condense(build("compact", template=template(tmp_path), max_tokens=40, over_budget=over), history, 250)
        for over in (False, True)
    ]
    assert [one.note is None for one in found] == [True, False]


# --- memory -----------------------------------------------------------------------------------------------------------

WRITE = ("memory_write", {"name": "Ben", "text": "12"})
NET = {"name": "last_k", "over": 0, "options": {"keep_last": 2}}


def test_notes_are_shown_again_once_their_turns_left_the_view() -> None:
    memory = build("pipeline", stages=[NET, {"name": "memory", "over": 0}])
    one = played(memory, call("memory_write", **WRITE[1]), "look 1", "look 2", "look 3")
    assert view(one, 2)[0] == call("memory_write", **WRITE[1])
    assert [without_meter(message.text) for message in one.turns[3].context[2:]] == [
        "look 1",
        "seen 1\n[turn 1]\n\n[Your notes]\nBen: 12",
        "look 2",
        "seen 2",
    ]
    declared = one.turns[3].condensation
    assert declared is not None
    assert [span.status.value for span in declared.spans] == ["dropped", "rewritten", "kept"]
    assert declared.reason == "last_k: kept 2 of 3 units; memory: showed the policy's notes Ben again"


def test_a_note_that_was_deleted_or_written_anew_is_not_shown_in_its_old_form() -> None:
    again = ("memory_write", {"name": "Ben", "text": "13"})
    memory = build("memory")
    for last, words in ((("memory_delete", {"name": "Ben"}), []), (again, [])):
        history = past(memory, WRITE, None, None, last)
        assert [
            unit for unit in condense(memory, history, 150).units if "[Your notes]" in unit.results[-1].text
        ] == words


def test_a_note_that_was_deleted_is_not_shown_after_the_turn_that_wrote_it_left_the_view() -> None:
    memory = build("pipeline", stages=[NET, {"name": "memory", "over": 0}])
    deleted = call("memory_delete", name="Ben")
    one = played(memory, call("memory_write", **WRITE[1]), "look 1", "look 2", deleted, "look 4", "look 5")
    contexts = ["\n".join(message.text for message in turn.context[2:]) for turn in one.turns]
    assert "[Your notes]" in contexts[3]  # before it was deleted
    assert not any("[Your notes]" in context for context in contexts[4:])


def test_notes_that_do_not_fit_beside_the_newest_unit_are_left_out_oldest_first() -> None:
    memory = build("memory")
    writes = [("memory_write", {"name": f"n{number}", "text": "x" * 30}) for number in range(3)]
    history = past(memory, *writes, None)
    found = condense(memory, history, 23 + 70 + 60)
    assert [unit.turn for unit in found.units] == [3]
    assert "n2: " in found.units[0].results[-1].text
    assert "n0: " not in found.units[0].results[-1].text
    assert re.search(r"dropped the 3 oldest; showed the policy's notes n2 again; 2 notes do not fit", found.reason)


def test_after_a_summary_notes_are_shown_behind_it(tmp_path: Path) -> None:
    both = stages(("compact", {"template": template(tmp_path)}), "memory")
    one = played(both, call("memory_write", **WRITE[1]), LONG, call("compact"), "look 4")
    assert view(one, 4) == [SUMMARY, call("compact")]
    assert one.turns[4].context[-1].text.endswith("[Your notes]\nBen: 12")
    assert broken_invariants(one) == ()


@pytest.mark.parametrize(
    ("call_of", "words"),
    [
        (("memory_write", {"name": "b", "text": "x" * 20}), "21 characters, the others .Ben. have 5, and together 25"),
        (("memory_write", {"name": "b", "text": "x" * 30}), "the note has 31 characters with its name, and at most 24"),
        (("memory_read", {"name": "b"}), "there is no note 'b'; the notes are: Ben"),
        (("memory_delete", {"name": "b"}), "there is no note 'b'"),
        (("memory_write", {"name": "b", "text": 3}), "argument 'text' is 3: Input should be a valid string"),
    ],
)
def test_a_wrong_note_is_told_what_is_wrong(call_of: tuple[str, dict[str, object]], words: str) -> None:
    memory = build("memory", note_chars=24, total_chars=25)
    history = past(memory, WRITE, call_of, ("memory_read", {"name": "Ben"}))
    assert re.search(words, history.units[1].results[0].text)
    assert history.units[2].results[0].text == "<result>12</result>"


@pytest.mark.parametrize(
    ("tool", "arguments", "kept"),
    [
        ("memory", ("memory_write", {"name": "a", "text": "\ud83d"}), 1),
        ("prune", ("prune", {"turns": [0], "note": "\ud83d"}), 9),
    ],
)
def test_half_of_an_emoji_ends_no_episode(tool: str, arguments: tuple[str, dict[str, object]], kept: int) -> None:
    """JSON may escape it, and no tokenizer takes it: the episode would end as environment_error when it is shown."""
    one = played(
        stages(tool, net=[{"name": "last_k", "over": 0, "options": {"keep_last": kept}}]),
        "look 0",
        call(arguments[0], **arguments[1]),
        "look 2",
    )
    assert "Error" not in answers(one, 1)
    assert one.stop is StopReason.ANSWERED


# --- recall -----------------------------------------------------------------------------------------------------------


def test_a_dropped_observation_is_shown_again_cut_to_a_size_and_counts_as_a_refetch() -> None:
    recall = stages(("recall", {"max_chars": 5}), net=[NET])
    one = played(recall, "look 0", "look 1", "look 2", call("recall", turn=0))
    assert (
        without_meter(answers(one, 3)) == "<result>[recalled from turn 0]\nseen \n[… 1 characters left out …]</result>"
    )
    assert fetches(one) == (1, 1)
    assert one.turns[3].tool_successes == 1


def test_the_same_recall_twice_is_two_refetches_and_not_three() -> None:
    recall = stages("recall", net=[{"name": "last_k", "over": 0, "options": {"keep_last": 1}}])
    one = played(recall, "look 0", "look 1", *[call("recall", turn=0)] * 2)
    assert fetches(one) == (2, 2)


def test_a_recall_of_a_unit_in_view_is_refused_although_it_is_not_the_newest() -> None:
    recall = stages("recall", net=[{"name": "last_k", "over": 0, "options": {"keep_last": 3}}])
    one = played(recall, "look 0", "look 1", "look 2", "look 3", call("recall", turn=2), call("recall", turn=0))
    assert "turn 2 is in your context; read it there" in answers(one, 4)
    assert "[recalled from turn 0]" in answers(one, 5)


def test_a_masked_observation_is_shown_again_and_one_in_view_is_refused() -> None:
    masked = stages("recall", net=[{"name": "observation_mask", "over": 0, "options": {"keep": 1}}])
    calls = [call("recall", turn=turn) for turn in (1, 0, 9)]
    one = played(masked, call("recall", turn="x" * 80), "look 1", *calls)
    assert "turn 1 is in your context; read it there" in answers(one, 2)
    assert "[recalled from turn 0]\nError: recall: argument 'turn' is \"xxx" in answers(one, 3)
    assert "there is no turn 9; the turns so far: 0–3" in answers(one, 4)
    assert fetches(one).refetches == 1


# --- all of them ------------------------------------------------------------------------------------------------------

SMALL = st.integers(-1, 9)
TEXT = st.text(max_size=12) | st.sampled_from(["", "a", "Error: no", "</tool>", "[turn 3]"])
NAME = st.sampled_from(["a", "b", "c"])
CALLS = st.one_of(
    st.builds(call, st.just("branch"), description=TEXT),
    st.builds(call, st.just("return"), message=TEXT),
    st.builds(call, st.just("prune"), turns=st.lists(SMALL, max_size=4)),
    st.builds(call, st.just("prune"), turns=st.lists(SMALL, min_size=1, max_size=3), note=TEXT),
    st.builds(call, st.just("compact")),
    st.builds(call, st.just("memory_write"), name=NAME, text=TEXT),
    st.builds(call, st.just("memory_delete"), name=NAME),
    st.builds(call, st.just("recall"), turn=SMALL),
    st.just('<tool>{"name": "prune"'),
)
REPLIES = st.lists(st.lists(CALLS, max_size=2).map("".join), min_size=2, max_size=12)


def condensers(folder: Path) -> list[Condenser]:
    compact = ("compact", {"template": template(folder), "max_tokens": 40})
    net = [{"name": "observation_mask"}, {"name": "last_k", "options": {"keep_last": 3, "keep_first": 1}}]
    return [
        *(build(name) for name in ("fold", "prune", "memory", "recall")),
        build("compact", **compact[1], over_budget=True),
        stages("fold", "prune", "recall", compact, net=[*net, {"name": "memory", "over": 0}]),
        stages("memory", "prune", "fold", "recall", net=[{"name": "truncate"}]),
        build("anchors", stages=[{"name": "fold", "over": 0}, {"name": "prune", "over": 0}, {"name": "truncate"}]),
    ]


def check_spans(one: Trajectory, turn: int) -> None:
    """What a condensation declares about every unit, against the messages that the turn was shown."""
    context, declared = one.turns[turn].context, one.turns[turn].condensation
    assert declared is not None
    omitted = [int(number) for message in context for number in re.findall(r"up to (\d+) omitted", message.text)]
    for span in declared.spans:
        for earlier in span.turns:
            unit = one.turns[earlier]
            if unit.kind != "act":
                continue
            at = next((index for index, message in enumerate(context) if message == unit.reply), None)
            whole = at is not None and tuple(context[at : at + 1 + len(unit.observations)]) == (
                unit.reply,
                *unit.observations,
            )
            status = {
                SpanStatus.KEPT: whole,
                SpanStatus.DROPPED: at is None,
                SpanStatus.REWRITTEN: not whole and (at is not None or any(earlier <= number for number in omitted)),
            }[span.status]
            assert status, (turn, earlier, span.status, context)


@pytest.mark.parametrize("which", range(8))
@settings(max_examples=8)
@given(replies=REPLIES, room=st.sampled_from([9000, 900, 400]))
def test_the_declared_spans_match_what_was_shown(which: int, replies: list[str], room: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        condenser = condensers(Path(folder))[which]
        toolbox = deciding(condenser, []).toolbox
        pinned = toolbox.introduced(PINNED)
        tokens = Renderer(tokenizer()).count(pinned) + room
        numbered = [f"{number} {reply}" for number, reply in enumerate(replies)]
        one = played(condenser, *numbered, max_context_tokens=tokens)
    assert one.stop in (StopReason.ANSWERED, StopReason.CONTEXT_OVERFLOW), one.detail
    assert broken_invariants(one) == ()
    assert all(len(turn.prompt_ids) <= tokens for turn in one.turns)
    for index, turn in enumerate(one.turns):
        if index == 0:
            continue
        assert turn.context[:2] == one.turns[0].context, "pinned messages stay"
        newest = max(earlier for earlier in range(index) if one.turns[earlier].kind == "act")
        assert one.turns[newest].reply in turn.context, "so does the newest unit"
        if turn.condensation is None:
            last = one.turns[index - 1]
            assert [*turn.context[: len(last.context)]] == [*last.context]
        elif turn.kind == "act":
            check_spans(one, index)


def test_the_meter_names_the_turn_and_the_tokens_and_prompts_continue_by_ids() -> None:
    one = played(build("full"), "look 0", "look 1", trigger=CondenseSettings(meter="tokens"), max_context_tokens=400)
    for number in (0, 1):
        line = answers(one, number).removeprefix(f"seen {number + 1}")
        used = len(one.turns[number + 1].prompt_ids) - len(tokenizer().encode(line))
        assert line == f"\n[turn {number}: {used} of 400 context tokens used, {400 - used} left]"
        assert without_meter(answers(one, number)) == f"seen {number + 1}"
    assert all(turn.condensation is None for turn in one.turns)


@pytest.mark.parametrize(
    ("step", "budget"), [(0, 1000), (10, 1000), (35, 750), (60, 500), (80, 400), (99, 400), (-1, 400)]
)
def test_the_budget_of_a_step_is_linear_between_the_points_of_the_schedule(step: int, budget: int) -> None:
    assert CondenseSettings(schedule=((10, 1.0), (60, 0.5), (80, 0.4))).budget(1000, step) == budget
    assert CondenseSettings().budget(1000, step) == 1000


def test_an_engine_has_the_budget_of_its_step() -> None:
    made = deciding(
        build("full"), [], trigger=CondenseSettings(schedule=((0, 1.0), (10, 0.5))), max_context_tokens=1000
    )
    assert [made.at_step(step).limits.max_context_tokens for step in (0, 5, 10, -1)] == [1000, 750, 500, 500]


class Answering(Counting):
    """An environment that answers all calls itself."""

    stop_strings = ()


@pytest.mark.parametrize(("condenser", "meter"), [("fold", "none"), ("full", "turns")])
def test_an_environment_that_answers_all_calls_itself_takes_neither_tools_nor_a_meter(
    condenser: str, meter: Literal["none", "turns"]
) -> None:
    made = deciding(build(condenser), ["look"], trigger=CondenseSettings(meter=meter))
    episode = run_episode(problem(), environment=Answering, engine=made, group_id="0", sample=0, seed=lambda turn: turn)
    one = asyncio.run(episode)
    assert one.stop is StopReason.ENVIRONMENT_ERROR
    assert "its environment answers every call" in one.detail
    assert one.turns == ()
