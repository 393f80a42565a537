"""The note-taking task: its episodes, its problems, its expert, and what it calls sound."""

import asyncio
from pathlib import Path

import pytest
from command import ROOT
from playing_experts import turns

from condensegrpo.condensers.summary import PolicySummary
from condensegrpo.condensers.whole_units import LastK
from condensegrpo.config.options import build_plugin
from condensegrpo.core.messages import Message
from condensegrpo.studies.tasks.notes import CHATTER, INSTRUCTION, Notes
from condensegrpo.tasks.drawn import is_eval_content

MIRA, JON, ASKED = "Mira's locker is number 42.", "Jon's table is number 17.", "Which number is Mira's locker?"


def context(*said: str) -> tuple[Message, ...]:
    """The instruction, then a note and a message in turn."""
    roles = ("assistant", "user")
    texts = [Message(role=roles[place % 2], content=text) for place, text in enumerate(said)]
    return (Message(role="user", content=INSTRUCTION), *texts)


def test_an_episode_sends_every_fact_and_then_the_question() -> None:
    task = Notes(min_facts=2, max_facts=2)
    problem = task.problems("eval")[0]

    async def play() -> None:
        environment = task.environment(problem)
        assert await environment.start() == context()
        for message in problem.data["messages"]:
            step = await environment.step(Message(role="assistant", content="Notes: none"))
            assert (step.done, [each.content for each in step.observations]) == (False, [message])
        end = await environment.step(Message(role="assistant", content=f"It is {problem.answer}, not 5."))
        assert (end.done, end.answer) == (True, problem.answer)

    asyncio.run(play())
    assert len(problem.data["messages"]) == 3
    assert problem.question == problem.data["messages"][-1]
    assert f"is number {problem.answer}." in "".join(problem.data["messages"])


def test_evaluation_problems_are_different_and_no_training_problem() -> None:
    task = Notes()
    held_out = ["\n".join(problem.data["messages"]) for problem in task.problems("eval")]
    assert len(set(held_out)) == 256
    assert all(map(is_eval_content, held_out))
    assert not any(is_eval_content("\n".join(problem.data["messages"])) for problem in task.problems("train")[:200])


@pytest.mark.parametrize(
    ("said", "reply", "sound"),
    [
        (("Notes: none", MIRA), "Notes: Mira locker 42", True),
        (("Notes: Mira locker 42", JON), "42 is Mira's locker and 17 Jon's table", True),
        (("Notes: Mira locker 42", JON), "Notes: Jon table 17", False),
        (("Notes: Mira locker 42", JON), "Notes: Mira locker 42; Jon table 71", False),
        (("Notes: Mira locker 42; Jon table 17", ASKED), "42", True),
        (("Notes: Mira locker 42; Jon table 17", ASKED), "Jon has 17", False),
        (("Notes: Jon table 17", ASKED), "42", None),
        ((), "Notes: none", True),
    ],
)
def test_a_note_carries_every_number_on_and_an_answer_is_the_one_asked_for(
    said: tuple[str, ...], reply: str, sound: bool | None
) -> None:
    assert Notes().sound(context(*said), reply) is sound


def test_a_fifth_of_the_notes_of_the_expert_lose_a_fact_and_the_rest_is_sound() -> None:
    task = Notes()
    shown = [turn.shown for turn in turns(task, 600, condenser=LastK(keep_last=1))]
    judged = [sound for turn in shown if (sound := task.sound(turn.context, turn.reply)) is not None]
    assert 0.85 < sum(judged) / len(judged) < 0.95  # notes of one fact lose none
    assert all(len(turn.context) <= 3 for turn in shown)


def test_the_expert_writes_a_note_where_a_condenser_requests_a_summary(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("Sum up.")
    condenser = PolicySummary(keep_last=1, max_tokens=79, always=True, template=str(tmp_path / "note.txt"))
    shown = [turn.shown for turn in turns(Notes(), 60, condenser=condenser, max_context_tokens=1200)]
    requested = [turn for turn in shown if turn.context[-1].text.endswith("\n\nSum up.")]
    assert requested
    assert all(turn.reply.startswith("Notes: ") for turn in requested)
    assert sum(Notes().sound(turn.context, turn.reply) is True for turn in requested) > 0.6 * len(requested)


def test_where_notes_are_requested_no_other_reply_and_only_a_request_has_facts() -> None:
    task = Notes(notes="requested", chatter=3)
    condenser = PolicySummary(keep_last=1, max_tokens=79, always=True)
    shown = [turn.shown for turn in turns(task, 60, condenser=condenser, max_context_tokens=2400)]
    judged = [(turn.reply.startswith("Notes: "), task.sound(turn.context, turn.reply)) for turn in shown]
    assert all(turn.reply == "OK" or turn.reply.isdecimal() for turn in shown if "\n\n" not in turn.context[-1].text)
    assert sum(sound is True for notes, sound in judged if notes) > 0.6 * sum(notes for notes, _ in judged)
    assert all(sound is not False for notes, sound in judged if not notes)
    assert task.sound(context("OK", MIRA), "Mira locker 42") is False


def test_chatter_stands_around_a_fact_and_changes_no_problem() -> None:
    task = Notes(chatter=3)
    problem = task.problems("eval")[0]
    assert problem == Notes().problems("eval")[0]
    *facts, question = problem.data["messages"]
    *messages, last = task.environment(problem).messages
    assert last == question
    for fact, message in zip(facts, messages, strict=True):
        assert fact in message
        assert sum(sentence in message for sentence in CHATTER) == message.count(".") - 1 == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_facts": 3, "max_facts": 2}, "min_facts=3"),
        ({"max_facts": 13}, "at most 12"),
        ({"min_facts": 0}, "at least 1"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(Exception, match=words):
        build_plugin("tasks", f"{ROOT}/studies/tasks/notes.py:Notes", options)
