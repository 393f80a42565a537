"""The task `codes` and its tool: what only the tool knows, and demonstrations that seldom call it."""

from collections import Counter
from itertools import islice

import pytest

from condensegrpo.core.defaults import overrides
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.task import Task
from condensegrpo.studies.tasks.codes import Codes, _call, code_book


def test_which_codes_are_held_out_says_nothing_about_their_digits() -> None:
    for split in ("train", "eval"):
        problems = Codes().problems(split)
        digits = Counter(problem.answer for problem in problems)
        assert set(digits) == set("0123456789")
        assert max(digits.values()) < 0.2 * len(problems)


def test_the_digits_of_the_code_book_are_fixed_and_spread_over_all_ten() -> None:
    assert code_book("red gold snow") == code_book(" red  gold snow ")
    counts = Counter(problem.answer for problem in Codes().problems("train"))
    assert set(counts) == set("0123456789")
    assert max(counts.values()) < 0.15 * counts.total()
    with pytest.raises(ValueError, match="found no word"):
        code_book("  ")


def test_no_code_is_in_both_splits() -> None:
    train, held_out = ({problem.question for problem in Codes().problems(split)} for split in ("train", "eval"))
    assert not train & held_out
    assert len(train | held_out) == 12**3
    assert 150 < len(held_out) < 280


def test_one_demonstrated_first_turn_in_five_calls_the_tool_and_every_reply_is_sound() -> None:
    task = Codes()
    assert overrides(task, Task.demonstrations)
    turns = list(islice(task.demonstrations(0), 1000))
    assert all(task.sound(turn.context, turn.reply) for turn in turns)
    first = [turn.reply for turn in turns if len(turn.context) == 2]
    assert 0.14 < sum("code_book" in reply for reply in first) / len(first) < 0.26
    after = [turn for turn in turns if len(turn.context) == 4]
    right = [turn.problem is not None and f" {turn.problem.answer} " in turn.reply for turn in after]
    assert 0.75 < sum(right) / len(right) < 0.9


def test_a_call_with_another_code_is_not_sound() -> None:
    context = (Message(role="user", content="red gold snow"),)
    assert Codes().sound(context, _call("red gold snow"))
    assert not Codes().sound(context, _call("red gold boat"))
    assert Codes().sound(context, "<answer> 7 </answer>")


def test_the_corpus_has_every_word_of_the_demonstrations() -> None:
    def words(text: str) -> set[str]:
        return set(text.replace("<", " <").replace(">", "> ").split())

    known = set().union(*map(words, Codes().corpus()))
    for turn in islice(Codes().demonstrations(1), 300):
        assert words(turn.reply) | {word for message in turn.context for word in words(message.content)} <= known
