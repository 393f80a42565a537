"""The task of needles: codes amid passages, notes that forget nothing, and splits without a common passage."""

import asyncio
import json
from pathlib import Path

import pytest

from condensegrpo.condensers.summarising import read_instruction
from condensegrpo.core.condenser import Request
from condensegrpo.core.messages import Message, Unit
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.protocols.task import Problem
from condensegrpo.studies.tasks.needles import PLACES, Needles, codes_in

BY_HAND = Problem(
    id="by hand",
    question="What are the codes of the chapel and the mill?",
    answer="90125 40218",
    data={
        "texts": [
            "Alaska was The code of the mill is 40218. bought in 1867",
            "It froze. The code of the dock is 77301.",
            "The code of the chapel is 90125. It rained.",
        ],
        "asked": ["chapel", "mill"],
    },
)


@pytest.fixture
def task(tmp_path: Path) -> Needles:
    """60 passages of twelve words, each in two rows; the first word tells them apart."""
    rows = [
        {"question": f"what {n}", "answers": ["x"], "ctxs": [{"text": f"p{n % 60}p " + "word " * 11}]}
        for n in range(120)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return Needles(data=str(tmp_path / "rows.jsonl"), texts=8, words=12, eval_problems=20)


def test_an_episode_shows_the_texts_and_then_the_question_and_reads_the_codes_of_the_answer(task: Needles) -> None:
    async def play(*replies: str) -> list[Step]:
        environment = task.environment(BY_HAND)
        (pinned,) = await environment.start()
        assert BY_HAND.question in pinned.text
        return [await environment.step(Message(role="assistant", content=reply)) for reply in replies]

    *steps, last = asyncio.run(play("OK", "OK", " OK\n", "OK", "chapel 90125 and mill 40218."))
    assert [step.observations[0].text for step in steps] == [*BY_HAND.data["texts"], BY_HAND.question]
    assert last == Step(done=True, answer=BY_HAND.answer)
    assert asyncio.run(play("OK", "OK. mill 40218"))[1] == Step(done=True)  # a reply that carries a code is no OK


def test_the_expert_notes_the_codes_that_are_asked_for_and_forgets_none(task: Needles) -> None:
    expert = task.expert(BY_HAND)
    reply, (first, second, third) = Message(role="assistant", content="OK"), BY_HAND.data["texts"]

    def unit(turn: int, text: str) -> Unit:
        return Unit(turn=turn, reply=reply, results=(Message(role="user", content=text),))

    def note_of(*texts: str) -> str:
        units = tuple(unit(turn, text) for turn, text in enumerate(texts))
        return expert.write(Request(units=units, instruction=read_instruction(None).template))

    assert note_of(second) == "none"
    assert note_of(first, second) == "mill 40218"
    assert note_of("mill 40218", third) == "chapel 90125; mill 40218"  # a note is carried on
    assert expert.reply([Message(role="user", content="You will get texts")]) == "OK"
    assert expert.reply([Message(role="user", content=third)]) == "OK"
    question = Message(role="user", content=BY_HAND.question)
    assert expert.reply([Message(role="user", content="chapel 90125; mill 40218"), question]) == "90125 40218"
    assert expert.reply([Message(role="user", content="mill 40218"), question]) == "unknown 40218"


def test_problems_ask_for_two_of_the_codes_and_share_no_passage_with_those_that_are_held_out(task: Needles) -> None:
    passages = []
    for split in ("train", "eval"):
        shown = set()
        for problem in task.problems(split)[:20]:
            texts = [Message(role="user", content=text) for text in problem.data["texts"]]
            codes = codes_in(texts)
            assert len(texts) == len(codes) == 8
            assert problem.answer == " ".join(codes[place] for place in problem.data["asked"])
            shown |= {word for text in texts for word in text.text.split() if word[0] == "p" == word[-1]}
        passages.append(shown)
    assert not passages[0] & passages[1]
    assert task.problems("train")[3] == task.problems("train")[3]
    assert task.problems("train")[0].question != task.problems("eval")[0].question


def test_places_are_single_words_of_which_none_begins_another() -> None:
    assert len(set(PLACES)) == len(PLACES) >= 64
    text = "; ".join(f"{place} {number}" for number, place in enumerate(PLACES, start=10_000))
    assert len(codes_in([Message(role="assistant", content=text)])) == len(PLACES)
