"""The task of BFCL's memory questions: problems, episodes and the expert, on a small file of the same format."""

import asyncio
from pathlib import Path

import pytest
from command import ROOT
from memory_questions import write_memory_questions
from playing_experts import turns

from condensegrpo.assembly.demonstrations import DemonstratedTurn
from condensegrpo.condensers.whole_units import LastK
from condensegrpo.config.options import build_plugin
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.task import Problem
from condensegrpo.rewards.matches import Matcher
from condensegrpo.studies.tasks.bfcl_memory import LAST_MESSAGE, BfclMemory, _excerpt

SAID = {
    "home": [[f"In room {place} stands a {thing}." for place, thing in enumerate(("sofa", "lamp", "desk", "vase"))]]
}
THINGS = {0: "sofa", 1: "lamp", 2: "desk", 3: "vase"}
QUESTIONS = [
    ("home", f"Which thing stands in room {place % 4}, asked {place}?", [THINGS[place % 4]]) for place in range(20)
]


@pytest.fixture
def task(tmp_path: Path) -> BfclMemory:
    """Twenty questions whose answer stands in one of four messages, and one whose answer stands nowhere."""
    nowhere = ("home", "Which thing is outside?", ["bench"])
    return BfclMemory(data=str(write_memory_questions(tmp_path, SAID, [*QUESTIONS, nowhere])), messages=2)


def played(task: BfclMemory, count: int) -> list[DemonstratedTurn]:
    return turns(task, count, condenser=LastK(keep_last=1))


def test_the_splits_share_no_question_and_leave_out_what_no_message_answers(task: BfclMemory) -> None:
    train, held_out = ({problem.question for problem in task.problems(split)} for split in ("train", "eval"))
    assert train
    assert held_out
    assert not train & held_out
    assert train | held_out == {question for _, question, _ in QUESTIONS}
    shown = {turn.shown.problem.question for turn in played(task, 100) if turn.shown.problem is not None}
    assert shown == train


def test_the_message_with_the_answer_is_among_the_neighbours_that_an_episode_sends(task: BfclMemory) -> None:
    said = SAID["home"][0]
    for problem in (*task.problems("train"), *task.problems("eval")):
        messages = problem.data["messages"]
        assert len(messages) == 2
        assert messages == said[(first := said.index(messages[0])) : first + 2]
        assert str(problem.answer) in messages[problem.data["index"]]

    async def play() -> None:
        environment = task.environment(problem)
        assert (await environment.start())[-1] == Message(role="user", content=problem.question)
        for text in (*messages, LAST_MESSAGE):
            step = await environment.step(Message(role="assistant", content="Notes: none"))
            assert (step.done, [each.content for each in step.observations]) == (False, [text])
        assert (await environment.step(Message(role="assistant", content=" A vase. "))).answer == "A vase."
        assert (await task.environment(problem).start())[0].role == "system"

    asyncio.run(play())


def test_a_note_of_the_expert_is_empty_until_the_answer_came_and_then_carries_it_on(task: BfclMemory) -> None:
    for turn in [demonstrated.shown for demonstrated in played(task, 100)]:
        assert turn.problem is not None
        newest, answer = turn.context[-1].content, str(turn.problem.answer)
        noted = any(answer in message.content for message in turn.context[2:])
        if newest == LAST_MESSAGE:
            assert (turn.reply, noted) == (answer, True)
        else:
            assert (answer in turn.reply) is noted
        assert task.sound(turn.context, turn.reply) is True
    assert task.sound((*turn.context[:2], Message(role="assistant", content="Notes: none"),
                       Message(role="user", content=LAST_MESSAGE)), "vase") is None  # fmt: skip


def test_an_excerpt_has_the_answer_in_the_middle_of_its_words() -> None:
    words = " ".join(f"w{place}" for place in range(40))
    assert _excerpt(words, "w20").split() == [f"w{place}" for place in range(15, 27)]
    assert _excerpt("just a vase", "vase") == "just a vase"


@pytest.mark.parametrize(
    ("answer", "right"), [("It is the Engi-House.", True), ("engi house", False), ("EngiHouses", False), ("", False)]
)
def test_an_answer_is_right_if_it_contains_a_listed_one_as_whole_words(answer: str, right: bool) -> None:
    problem = Problem(id="p", question="?", answer="Engi-House", data={"aliases": ["EngiHouse", ""]})
    assert Matcher("words").is_right(answer, problem) is right


def test_data_that_is_no_benchmark_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"has no BFCL_v4_memory\.json"):
        build_plugin("tasks", f"{ROOT}/studies/tasks/bfcl_memory.py:BfclMemory", {"data": str(tmp_path)})
