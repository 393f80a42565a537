"""The task of hidden demand: exact anchors, sound experts, and a demand that no message shows."""

import asyncio
import random
from collections import Counter
from fractions import Fraction
from functools import cache
from itertools import combinations, islice
from typing import Literal

import pytest
from command import ROOT

from condensegrpo.assembly.build import build
from condensegrpo.assembly.components import Components
from condensegrpo.assembly.demonstrations import demonstrations
from condensegrpo.assembly.runtime import renderer_with
from condensegrpo.config.load import load_config
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.protocols.task import Demonstration, Problem
from condensegrpo.learner.new_model import new_tokenizer
from condensegrpo.studies.tasks.demand import DEMAND, KEPT, KINDS, VALUES, HiddenDemand, facts_in

Keeps = Literal["random", "newest", "asked"]
FACTS = ["C11", "E18", "A2", "F17", "H5", "B0", "D4", "G13"]
BY_HAND = Problem(id="by hand", question="C ?", answer="C C11", data={"facts": FACTS})
CONFIG = ROOT / "studies/configs/h_demand.yaml"


def last_note(task: HiddenDemand, kinds: list[str], rng: random.Random) -> list[str]:
    """What the two notes of an episode leave: of the first six pages, then of that note and the last two."""
    return task.kept([*task.kept(kinds[:6], rng), *kinds[6:]], rng)


def shares(task: HiddenDemand) -> dict[str, Fraction]:
    """How often each kind is asked for."""
    return {kind: Fraction(round(100 * share), 100) for kind, share in zip(task.order, DEMAND, strict=True)}


def test_a_keeper_of_the_three_kinds_that_are_asked_most_answers_three_questions_in_four() -> None:
    rng = random.Random(0)
    for demand in range(20):
        task = HiddenDemand(demand=demand, keeps="asked")
        for _ in range(20):
            noted = last_note(task, rng.sample(KINDS, 8), rng)
            assert sum(shares(task)[kind] for kind in noted) == Fraction(3, 4)


def test_keepers_of_the_newest_or_of_random_facts_answer_three_questions_in_eight() -> None:
    newest = HiddenDemand(keeps="newest")
    orders = [[*KINDS[at:], *KINDS[:at]] for at in range(8)]  # each kind at each page once: as in all orders
    notes = [last_note(newest, order, random.Random(0)) for order in orders]
    assert all(note == order[-KEPT:] for note, order in zip(notes, orders, strict=True))
    assert sum(shares(newest)[kind] for note in notes for kind in note) / 8 == Fraction(3, 8)
    chances = Counter[int]()  # of each page to be in the last note, over all pairs of random notes
    for first in combinations(range(6), 3):
        for last in combinations((*first, 6, 7), 3):
            chances.update(last)
    assert sum(chances.values()) == 3 * 20 * 10
    assert sum(Fraction(chances[page], 200) for page in range(8)) / 8 == Fraction(3, 8)


@cache
def components(*overrides: str) -> Components:
    return build(load_config(CONFIG, ["task.options.eval_problems=8", "evaluate.problems=8", *overrides]))


@cache
def turns(keeps: Keeps, demand: int = 10) -> tuple[Demonstration, ...]:
    """The turns of 80 of the expert's episodes, under the condenser and with the tokenizer of the study."""
    parts = components(f"task.options.keeps={keeps}", f"task.options.demand={demand}")
    tokenizer = new_tokenizer(parts.task.corpus(), kind="words", vocab_size=2048)
    shown = demonstrations(parts, renderer_with(parts, tokenizer, stop_ids=()), "none")
    return tuple(turn.shown for turn in islice(shown.turns(0), 9 * 80))


def is_asked(turn: Demonstration) -> bool:
    return turn.context[-1].text.endswith("?")


def is_note(turn: Demonstration) -> bool:
    return turn.context[-1].text.endswith("\n\nnote")


@pytest.mark.parametrize("keeps", ["random", "newest", "asked"])
def test_the_expert_copies_three_facts_right_and_answers_from_its_last_note(keeps: Keeps) -> None:
    task, shown = HiddenDemand(demand=10, keeps=keeps), turns(keeps)
    assert all(task.sound(turn.context, turn.reply) is not False for turn in shown)
    assert (sum(map(is_note, shown)), sum(map(is_asked, shown))) == (160, 80)
    right = 0
    for turn in filter(is_asked, shown):
        assert turn.problem is not None
        facts, answer = turn.problem.data["facts"], str(turn.problem.answer)
        (asked, fact), noted = answer.split(), facts_in(turn.context)
        kept = {"newest": fact in facts[-3:], "asked": asked in task.order[:3], "random": asked in noted}[keeps]
        assert turn.reply == (answer if kept else f"{asked} unknown")
        right += kept
    least, most = {"asked": (0.6, 0.9), "newest": (0.22, 0.53), "random": (0.22, 0.53)}[keeps]
    assert least < right / 80 < most


def test_no_message_but_the_question_depends_on_the_demand_and_no_note_is_written_after_it() -> None:
    one, other = turns("random", 10), turns("random", 11)
    told = [(mine, theirs) for mine, theirs in zip(one, other, strict=True) if mine != theirs]
    assert told
    for mine, theirs in zip(one, other, strict=True):
        assert is_asked(mine) == is_asked(theirs)
        assert mine.context[:-1] == theirs.context[:-1]
        if not is_asked(mine):
            assert (mine.context[-1], mine.reply) == (theirs.context[-1], theirs.reply)
    assert not any("?" in message.text for turn in one for message in turn.context if not is_asked(turn))


def test_questions_follow_the_demand_and_facts_do_not() -> None:
    task = HiddenDemand(demand=3)
    problems = task.problems("train")[:4000]
    asked = Counter(problem.question[0] for problem in problems)
    assert [asked[kind] / 4000 for kind in task.order] == pytest.approx(DEMAND, abs=0.03)
    at = Counter(problem.data["facts"].index(str(problem.answer)[2:]) for problem in problems)
    assert [at[page] / 4000 for page in range(8)] == pytest.approx([1 / 8] * 8, abs=0.03)
    values = Counter(fact[1:] for problem in problems for fact in problem.data["facts"])
    assert len(values) == VALUES


def test_a_demand_is_a_ranking_of_the_kinds_that_can_be_moved_once() -> None:
    orders = {HiddenDemand(demand=seed).order for seed in range(10, 20)}
    assert len(orders) == 10
    for order, moved in (
        (HiddenDemand(demand=seed).order, HiddenDemand(demand=seed, moved=3).order) for seed in range(5)
    ):
        assert sorted(order) == sorted(moved) == list(KINDS)
        assert not {*order[:3]} & {*moved[:3]}


def test_problems_of_all_demands_have_the_same_facts_and_none_is_held_out_and_trained_on() -> None:
    splits = [
        (HiddenDemand(demand=seed).problems("train")[:300], HiddenDemand(demand=seed).problems("eval"))
        for seed in (1, 2)
    ]
    facts = [[[" ".join(problem.data["facts"]) for problem in split] for split in both] for both in splits]
    assert facts[0] == facts[1]
    train, held_out = map(set, facts[0])
    assert len(held_out) == 256
    assert not train & held_out
    assert splits[0][1] != splits[1][1]


def context(*said: str) -> tuple[Message, ...]:
    roles = ("user", "assistant")
    return tuple(Message(role=roles[place % 2], content=text) for place, text in enumerate(("pages", *said)))


@pytest.mark.parametrize(
    ("newest", "reply", "sound"),
    [
        ("page D4 . the next page G13 .", "ok", None),
        ("page D4 . the next page G13 .", "D D4", False),
        ("page D4 . the next page G13 .\n\nnote", "G G13 E E18 D D4", True),
        ("page D4 . the next page G13 .\n\nnote", "G G13 E E18", False),
        ("page D4 . the next page G13 .\n\nnote", "G G13 E E18 E E18", False),
        ("page D4 . the next page G13 .\n\nnote", "G G13 E E18 D D5", False),
        ("page D4 . the next page G13 .\n\nnote", "G G13 D E18 E D4", False),
        ("page D4 . the next page G13 .\n\nnote", "G G13 E E18 D D4 D", False),
        ("E ?", "E E18", True),
        ("E ?", "C C11", False),
        ("E ?", "E unknown", False),
        ("D ?", "D unknown", True),
        ("D ?", "D D4", False),
    ],
)
def test_a_reply_is_sound_if_it_follows_from_its_context(newest: str, reply: str, sound: bool | None) -> None:
    assert HiddenDemand().sound(context("E E18 C C11 B B0", "[turns up to 2 omitted]", "ok", newest), reply) is sound


def play(*replies: str) -> list[Step]:
    async def run() -> list[Step]:
        environment = HiddenDemand().environment(BY_HAND)
        assert await environment.start() == context()
        return [await environment.step(Message(role="assistant", content=reply)) for reply in replies]

    return asyncio.run(run())


def test_an_episode_shows_two_pages_a_message_and_ends_with_the_answer() -> None:
    *steps, last = play(*["ok"] * 6, " C C11\n")
    assert [step.observations[0].text for step in steps] == [
        "page C11 . the next page E18 .",
        "page A2 . the next page F17 .",
        "page H5 . the next page B0 .",
        "page D4 . the next page G13 .",
        "that was all . now comes a question",
        "C ?",
    ]
    assert last == Step(done=True, answer="C C11")


def test_a_reply_cannot_carry_a_fact_beside_the_note() -> None:
    assert play("ok", "C C11")[1] == Step(done=True)
    assert components().config.condenser.options["max_tokens"] == 2 * KEPT + 1  # tokens: a kind, a value; the end


def test_the_tokenizer_knows_every_word() -> None:
    words = set(" ".join(HiddenDemand().corpus()).split())
    used = {
        word
        for turn in turns("random")
        for text in (turn.reply, *(each.text for each in turn.context))
        for word in text.split()
    }
    assert words.issuperset(word for word in used if not word.isdigit())
