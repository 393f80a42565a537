"""The story task: its episodes, its problems, its demonstrations, and what it calls sound."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from command import ROOT
from playing_experts import turns
from talk import agent, engine, play_all

from condensegrpo.condensers.summary import PolicySummary
from condensegrpo.condensers.whole_units import LastK
from condensegrpo.config.options import build_plugin
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.episodes.settings import CondenseSettings
from condensegrpo.studies.tasks.stories import Stories
from condensegrpo.tasks.drawn import is_eval_content

QUESTION = "where are Mira and Jon ?"
FIRST = "Ada entered the attic . Mira reached the garden ."
LAST = "Jon entered the cellar . Mira mentioned the office . done"
TWO_CHUNKS = Problem(id="by hand", question=QUESTION, answer="Mira garden Jon cellar", data={"chunks": [FIRST, LAST]})


def context(*said: str) -> tuple[Message, ...]:
    """The question, then notes and chunks in turn."""
    roles = ("user", "assistant")
    return tuple(Message(role=roles[place % 2], content=text) for place, text in enumerate((QUESTION, *said)))


def play(*replies: str) -> list[Step]:
    """The environment's answers to some replies."""

    async def run() -> list[Step]:
        environment = Stories().environment(TWO_CHUNKS)
        assert await environment.start() == context()
        return [await environment.step(Message(role="assistant", content=reply)) for reply in replies]

    return asyncio.run(run())


def text(problem: Problem) -> str:
    return "\n".join((problem.question, *problem.data["chunks"]))


def test_an_episode_sends_every_chunk_once_and_ends_with_the_answer() -> None:
    note = "<note> Mira somewhere Jon somewhere </note>"
    steps = play(note, note, "<answer>Mira garden\nJon cellar</answer>")
    assert [[message.content for message in step.observations] for step in steps] == [[FIRST], [LAST], []]
    assert [(step.done, step.answer) for step in steps] == [
        (False, None),
        (False, None),
        (True, "Mira garden Jon cellar"),
    ]


@pytest.mark.parametrize("reply", ["", "garden", "<answer> Mira garden Jon cellar </answer>", "<note> </note>"])
def test_a_reply_that_is_no_note_ends_the_episode_without_an_answer(reply: str) -> None:
    assert play(reply) == [Step(done=True)]


@pytest.mark.parametrize("chunks", [1, 4, 64])
def test_the_answer_is_where_the_people_who_are_asked_for_went_last(chunks: int) -> None:
    for problem in Stories(chunks=chunks, eval_problems=32).problems("eval"):
        words = " ".join(problem.data["chunks"]).split()
        names = [word for word in problem.question.split() if word[0].isupper()]
        moved = [at for at, word in enumerate(words) if word in ("entered", "reached")]
        last = {words[at - 1]: words[at + 2] for at in moved}  # Mira entered the garden
        assert problem.answer == " ".join(f"{name} {last[name]}" for name in names)
        assert len(problem.data["chunks"]) == chunks
        assert max(sum(words[at - 1] == name for at in moved) for name in names) <= 3
        assert words.count(".") == 3 * chunks


def test_stories_have_every_number_of_chunks_between_the_fewest_and_the_most() -> None:
    task = Stories(min_chunks=2, chunks=4, eval_problems=32)
    for problems in (task.problems("eval"), task.problems("train")[:50]):
        assert {len(problem.data["chunks"]) for problem in problems} == {2, 3, 4}
        assert all(" ".join(problem.data["chunks"]).endswith("done") for problem in problems)


def test_evaluation_problems_are_different_and_no_training_problem() -> None:
    for chunks in (4, 64):
        task = Stories(chunks=chunks, eval_problems=64)
        held_out = [text(problem) for problem in task.problems("eval")]
        assert len(set(held_out)) == 64
        assert all(map(is_eval_content, held_out))
        assert not any(is_eval_content(text(problem)) for problem in task.problems("train")[:50])


@pytest.mark.parametrize(
    ("said", "reply", "sound"),
    [
        ((), "<note> Mira somewhere Jon somewhere </note>", True),
        ((), "<note> Mira attic Jon somewhere </note>", False),
        (("<note> Mira somewhere Jon stable </note>", FIRST), "<note> Mira garden Jon stable </note>", True),
        (("<note> Mira office Jon stable </note>", FIRST), "<note> Mira office Jon stable </note>", False),
        (("<note> Mira office Jon stable </note>", FIRST), "<note> Mira garden Jon somewhere </note>", False),
        (("<note> Mira office Jon stable </note>", FIRST), "<note> read </note>", None),
        (("<note> Mira office Jon stable </note>", FIRST), "<note> Jon stable Mira garden </note>", False),
        (("<note> Mira garden Jon stable </note>", LAST), "<answer> Mira garden Jon cellar </answer>", True),
        (("<note> Mira garden Jon stable </note>", LAST), "<answer> Mira office Jon cellar </answer>", False),
        (("<note> Mira garden Jon stable </note>", LAST), "<note> Mira garden Jon cellar </note>", False),
        (("<note> Mira somewhere Jon stable </note>", LAST), "<answer> Mira garden Jon cellar </answer>", None),
    ],
)
def test_a_reply_says_what_the_note_and_the_chunk_before_it_say(
    said: tuple[str, ...], reply: str, sound: bool | None
) -> None:
    assert Stories().sound(context(*said), reply) is sound


def test_notes_of_the_expert_say_nothing_or_what_is_known() -> None:
    task = Stories()
    shown = [turn.shown for turn in turns(task, 400, condenser=LastK(keep_last=1))]
    verdicts = [task.sound(turn.context, turn.reply) for turn in shown]
    assert set(verdicts) == {True, None}
    assert 0.2 < verdicts.count(None) / 400 < 0.45
    assert all(len(turn.context) <= 3 for turn in shown)


@pytest.mark.parametrize("forgetful", [0.0, 1.0])
def test_with_the_whole_history_the_expert_answers_from_all_chunks_whatever_the_notes_say(forgetful: float) -> None:
    for turn in turns(Stories(forgetful=forgetful), 80):
        shown = turn.shown
        assert shown.problem is not None
        if shown.reply.startswith("<note>"):
            assert (shown.reply == "<note> read </note>") == bool(forgetful)
        else:
            assert shown.reply == f"<answer> {shown.problem.answer} </answer>"
            assert [message.content for message in shown.context[2::2]] == shown.problem.data["chunks"]


def test_the_corpus_has_every_word_of_the_task(tmp_path: Path) -> None:
    for task in (Stories(), Stories(people=3), Stories(chunks=8, notes="requested")):
        words = set(" ".join(task.corpus()).split())
        parts = summarising(tmp_path) if task.notes == "requested" else {}  # whose template has words of its own
        for turn in turns(task, 60, **parts):
            used = " ".join((turn.shown.reply, *(each.content for each in turn.shown.context))).split()
            assert words.issuperset(word for word in used if not word.isdigit())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"people": 4}, "wanted a sentence for each"),
        ({"people": 8, "sentences": 8}, "at most 7"),
        ({"chunks": 0}, "at least 1"),
        ({"chunks": 4, "min_chunks": 5}, "wanted min_chunks <= chunks"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(Exception, match=words):
        build_plugin("tasks", f"{ROOT}/studies/tasks/stories.py:Stories", options)


# --- summaries that the condenser requests ---------------------------------------------------------------------------


def careful(prompt: str) -> str:
    """An agent that says where people are in the note it is asked for and in the answer, from its prompt alone."""
    question, *rest = [part.partition("\n")[2].partition("<|im_end|>")[0] for part in prompt.split("<|im_start|>")[1:]]
    known = {word: "somewhere" for word in question.split() if word[0].isupper()}
    for words in map(str.split, rest):
        if words[:1] == ["<note>"]:
            known |= {name: place for name, place in pairwise(words) if name in known}
        known |= {words[at - 1]: words[at + 2] for at, word in enumerate(words) if word in ("entered", "reached")}
    said = " ".join(f"{name} {place}" for name, place in known.items() if name in question)
    newest = rest[-2].split() if len(rest) > 1 else [""]
    if newest[-1] == "done":
        return f"<answer> {said} </answer>"
    return f"<note> {said if newest[-1] == 'note' else 'read'} </note>"


def forgetting(prompt: str) -> str:
    """The careful agent, whose notes say nothing."""
    reply = careful(prompt)
    return "<note> read </note>" if reply.startswith("<note>") else reply


def summarising(folder: Path) -> dict[str, Any]:
    """Parts of an engine that condenses at 350 bytes by asking for a note."""
    (folder / "note.txt").write_text("note\n")
    condenser = PolicySummary(keep_last=1, max_tokens=60, template=str(folder / "note.txt"))
    early = CondenseSettings(when="over_budget", threshold=0.5)
    return {"condenser": condenser, "trigger": early, "max_turns": 9, "max_context_tokens": 700}


def played(task: Stories, reply: Callable[[str], str], folder: Path) -> list[Trajectory]:
    """One trajectory for each evaluation problem."""
    return play_all(engine(agent(reply), **summarising(folder)), task.problems("eval"), task.environment)


def test_a_place_survives_in_the_summary_that_the_condenser_asks_for_and_nowhere_else(tmp_path: Path) -> None:
    task = Stories(chunks=8, notes="requested", eval_problems=8)
    answers = [problem.answer for problem in task.problems("eval")]
    episodes = played(task, careful, tmp_path)
    assert [one.answer for one in episodes] == answers
    summaries = [turn for one in episodes for turn in one.turns if turn.kind == "condense"]
    assert all(task.sound(turn.context, turn.reply.content) for turn in summaries)
    assert (
        sum(one.answer == answer for one, answer in zip(played(task, forgetting, tmp_path), answers, strict=True)) < 4
    )


def test_a_note_is_sound_where_it_is_asked_for_and_follows_from_the_summary() -> None:
    task = Stories(notes="requested")
    asked = context("<note> Mira garden Jon somewhere </note>", "[turns up to 1 omitted]", "<note> read </note>")
    asked = (*asked, Message(role="user", content="Jon entered the cellar .\n\nnote"))
    assert task.sound(asked, "<note> Mira garden Jon cellar </note>") is True
    assert task.sound(asked, "<note> Mira garden Jon stable </note>") is False
    assert task.sound(asked, "<note> read </note>") is None
    unasked = (*asked[:-1], Message(role="user", content="Jon entered the cellar ."))
    assert task.sound(unasked, "<note> read </note>") is True
    assert task.sound(unasked, "<note> Mira garden Jon cellar </note>") is False


def test_the_expert_says_where_people_are_in_requested_notes_alone_and_forgets_as_often_as_told(tmp_path: Path) -> None:
    for forgetful, least, most in ((0.0, 0.0, 0.0), (0.5, 0.35, 0.65)):
        task = Stories(chunks=8, notes="requested", forgetful=forgetful)
        shown = [turn.shown for turn in turns(task, 400, **summarising(tmp_path))]
        requested = [turn for turn in shown if turn.context[-1].text.endswith("\n\nnote")]
        others = [turn for turn in shown if turn not in requested]
        assert len(requested) > 50
        assert least <= sum("read" in turn.reply for turn in requested) / len(requested) <= most
        assert {turn.reply for turn in others if turn.reply.startswith("<note>")} == {"<note> read </note>"}
        assert all(task.sound(turn.context, turn.reply) is not False for turn in shown)
