"""The ledger task: its episodes, its problems, its expert, and what it calls sound."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from playing_experts import turns

from condensegrpo.condensers.summary import PolicySummary
from condensegrpo.condensers.whole_units import Full, LastK
from condensegrpo.config.options import build_plugin
from condensegrpo.core.condenser import Condenser
from condensegrpo.core.errors import PluginError
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.protocols.task import Demonstration, Problem
from condensegrpo.tasks.drawn import EVAL_SHARE
from condensegrpo.tasks.ledger import OPERATIONS, Ledger

TWO_OPERATIONS = Problem(
    id="by hand", question="start 3 keep a note", answer="4", data={"start": 3, "ops": ["+2", "-1"]}
)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


def play(*replies: str, problem: Problem = TWO_OPERATIONS) -> list[Step]:
    """The environment's answers to some replies; it is not asked again once it is done."""

    async def run() -> list[Step]:
        environment = Ledger().environment(problem)
        assert await environment.start() == (user(problem.question),)
        steps: list[Step] = []
        for reply in replies:
            assert not (steps and steps[-1].done), "the episode was over before this reply"
            steps.append(await environment.step(assistant(reply)))
        return steps

    return asyncio.run(run())


def identity(problem: Problem) -> tuple[int, tuple[str, ...]]:
    return problem.data["start"], tuple(problem.data["ops"])


# --- episodes -------------------------------------------------------------------------------------------------------


def test_an_episode_shows_every_operation_once_and_ends_with_the_answer() -> None:
    steps = play("<note> 3 </note>", "<note> 5 </note>", "<note> 4 </note>", "<answer> 4 </answer>")
    assert [step.observations for step in steps] == [(user("+2"),), (user("-1"),), (user("done report"),), ()]
    assert [step.done for step in steps] == [False, False, False, True]
    assert steps[-1].answer == "4"


def test_a_wrong_answer_is_an_answer() -> None:
    assert play(*["<note> x </note>"] * 3, "<answer> 9 </answer>")[-1] == Step(done=True, answer="9")


def test_an_early_answer_ends_the_episode_without_an_answer() -> None:
    assert play("<note> 3 </note>", "<answer> 4 </answer>")[-1] == Step(done=True)


def test_whitespace_does_not_matter() -> None:
    steps = play("<note>3</note>", "  <note>\nis 5</note>\n", "<note> 4</note>", "<answer>4</answer> ")
    assert steps[-1].answer == "4"


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "5",
        "<note> 5",
        "5 </note>",
        "<note> </note>",
        "<note> 5 </note> and more",
        "well <note> 5 </note>",
        "<note> 5 </note> <note> 5 </note>",
        "<note> <note> 5 </note> </note>",
        "<note> <answer> 5 </answer> </note>",
        "<note> 5 </answer>",
        "</note> 5 <note>",
    ],
)
def test_anything_but_one_well_formed_note_is_a_format_error(reply: str) -> None:
    assert play(reply) == [Step(done=True)]


@pytest.mark.parametrize(
    "reply", ["<answer> 42 </answer>", "<answer> x </answer>", "<answer> 4 4 </answer>", "<note> 4 </note>", "4", "²"]
)
def test_anything_but_one_digit_as_the_answer_is_a_format_error(reply: str) -> None:
    assert play(*["<note> 3 </note>"] * 3, reply)[-1] == Step(done=True)


# --- problems -------------------------------------------------------------------------------------------------------


def test_the_answer_is_counted_modulo_ten() -> None:
    for problem in Ledger().problems("train")[:200]:
        moved = problem.data["start"] + sum(int(operation) for operation in problem.data["ops"])
        assert problem.answer is not None
        assert problem.answer in "0123456789"
        assert (moved - int(problem.answer)) % 10 == 0


def test_train_and_eval_share_no_problem_even_where_only_2160_exist() -> None:
    ledger = Ledger(min_ops=3, max_ops=3, train_problems=20_000, eval_problems=200)
    train = {identity(problem) for problem in ledger.problems("train")}
    held_out = {identity(problem) for problem in ledger.problems("eval")}
    assert len(held_out) == 200
    assert not train & held_out
    assert len(train) > 1800  # nearly all of the seven eighths of 2160: every problem can be drawn


def test_whether_a_problem_is_held_out_does_not_depend_on_the_options() -> None:
    wide = {identity(p) for p in Ledger(min_ops=3, max_ops=6, train_problems=5000, seed=1).problems("train")}
    narrow = {identity(p) for p in Ledger(min_ops=4, max_ops=4, seed=2, eval_problems=1000).problems("eval")}
    assert not wide & narrow


def test_eval_problems_are_all_different_balanced_and_always_the_same() -> None:
    problems = Ledger(seed=0).problems("eval")
    assert Counter(len(problem.data["ops"]) for problem in problems) == {3: 64, 4: 64, 5: 64, 6: 64}
    assert len({identity(problem) for problem in problems}) == len({problem.id for problem in problems}) == 256
    assert list(problems) == list(Ledger(seed=7).problems("eval"))


def test_eval_problems_that_do_not_divide_evenly_are_balanced_up_to_one() -> None:
    assert sorted(Counter(len(p.data["ops"]) for p in Ledger(eval_problems=10).problems("eval")).values()) == [
        2,
        2,
        3,
        3,
    ]


def test_long_episodes_can_be_evaluated() -> None:
    problems = Ledger(min_ops=50, max_ops=50, eval_problems=64).problems("eval")
    assert {len(problem.data["ops"]) for problem in problems} == {50}
    assert len(problems) == 64


def test_more_eval_problems_than_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"holding out 256 different problems of 1 operations: only \d+ exist"):
        Ledger(min_ops=1, max_ops=1).problems("eval")


def test_train_problems_are_a_sequence_in_a_fixed_order() -> None:
    problems = Ledger(train_problems=50).problems("train")
    again = Ledger(train_problems=50).problems("train")
    assert len(problems) == 50
    assert list(problems) == [again[index] for index in range(50)]
    assert problems[-1] == problems[49]
    assert list(problems[10:13]) == [problems[10], problems[11], problems[12]]
    assert len({problem.id for problem in problems}) == 50
    with pytest.raises(IndexError):
        problems[50]
    assert list(Ledger(train_problems=50, seed=1).problems("train")) != list(problems)


def test_train_problems_are_balanced_over_the_number_of_operations() -> None:
    counts = Counter(len(problem.data["ops"]) for problem in Ledger().problems("train")[:4000])
    assert set(counts) == {3, 4, 5, 6}
    assert all(900 < count < 1100 for count in counts.values())


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"min_ops": 0}, "min_ops is 0"),
        ({"min_ops": 7}, "max_ops=6"),
        ({"eval_problems": 0}, "eval_problems is 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object], found: str) -> None:
    with pytest.raises(PluginError, match=f"setting up the task 'ledger'.*{found}"):
        build_plugin("tasks", "ledger", options)


# --- the expert -----------------------------------------------------------------------------------------------------


def shown(ledger: Ledger, count: int, **parts: Any) -> list[Demonstration]:
    """Turns of the expert, by default under the condenser of the quickstart."""
    return [turn.shown for turn in turns(ledger, count, **{"condenser": LastK(keep_last=1), **parts})]


@pytest.fixture(scope="module")
def demonstrated() -> list[Demonstration]:
    return shown(Ledger(), 3000)


def test_note_styles_are_mixed_four_to_three_to_three(demonstrated: list[Demonstration]) -> None:
    notes = [one.reply for one in demonstrated if one.reply.startswith("<note>")]
    forgetful = sum(note == "<note> noted the op </note>" for note in notes)
    terse = sum(len(note.split()) == 3 for note in notes)
    verbose = sum("the value" in note for note in notes)
    assert forgetful + terse + verbose == len(notes)
    assert forgetful / len(notes) == pytest.approx(0.4, abs=0.03)
    assert verbose / len(notes) == pytest.approx(0.3, abs=0.03)


def test_first_and_final_turns_come_in_their_natural_proportion(demonstrated: list[Demonstration]) -> None:
    """An episode of K operations has K + 2 turns, one of them the first and one the final: 1/6.5 on average."""
    first = sum(len(one.context) == 1 for one in demonstrated)
    final = sum(one.context[-1].content == "done report" for one in demonstrated)
    assert first / 3000 == pytest.approx(1 / 6.5, abs=0.02)
    assert final / 3000 == pytest.approx(1 / 6.5, abs=0.02)


@pytest.mark.parametrize("condenser", [LastK(keep_last=1), Full()])
def test_the_expert_is_never_unsound(condenser: Condenser) -> None:
    ledger = Ledger()
    for one in shown(ledger, 200, condenser=condenser):
        assert ledger.sound(one.context, one.reply) is not False


def test_the_expert_finds_the_question_behind_a_system_message() -> None:
    task = Ledger()
    problem = task.problems("train")[0]
    asked = Message(role="user", content=problem.question)
    system = Message(role="system", content="You can call 2 tools.")
    assert task.expert(problem).reply([system, asked]) == task.expert(problem).reply([asked])


def test_the_expert_writes_a_note_where_a_condenser_requests_a_summary() -> None:
    condenser = PolicySummary(keep_last=1, max_tokens=79, always=True)
    made = shown(Ledger(), 120, condenser=condenser, max_context_tokens=3000)
    requested = [one for one in made if "Write a summary" in one.context[-1].text]
    assert requested
    assert all(one.reply.startswith("<note>") for one in requested)
    assert all(Ledger().sound(one.context, one.reply) is not False for one in requested)


def test_the_corpus_has_every_word_of_questions_observations_and_the_expert(demonstrated: list[Demonstration]) -> None:
    words = {word for text in Ledger().corpus() for word in text.split()}
    texts = (text for one in demonstrated for text in (*(message.text for message in one.context), one.reply))
    assert words == {word for text in texts for word in text.split()}
    assert len(words) == 37  # 10 digits, 6 operations, 4 tags, 17 words


# --- what is sound --------------------------------------------------------------------------------------------------

QUESTION = user("start 3 keep a note")


@pytest.mark.parametrize(
    ("context", "reply", "verdict"),
    [
        ((QUESTION,), "<note> 3 </note>", True),
        ((QUESTION,), "<note> the value is now 3 </note>", True),
        ((QUESTION,), "<note> 4 </note>", False),
        ((QUESTION,), "<note> noted the op </note>", None),
        ((QUESTION, assistant("<note> 8 </note>"), user("+3")), "<note> 1 </note>", True),
        ((QUESTION, assistant("<note> 8 </note>"), user("+3")), "<note> 6 </note>", False),  # from the start value
        ((QUESTION, assistant("<note> noted the op </note>"), user("-3")), "<note>0</note>", True),
        ((QUESTION, assistant("<note> 1 </note>"), user("-3")), "<note> the value was 1 so it is now 8 </note>", True),
        ((QUESTION, assistant("<note> 1 </note>"), user("-3")), "<note> 8", False),  # not well formed
        ((QUESTION, assistant("<note> 1 </note>"), user("-3")), "<answer> 8 </answer>", False),  # too early
        ((QUESTION, assistant("<note> 6 </note>"), user("done report")), "<answer> 6 </answer>", True),
        ((QUESTION, assistant("<note> 6 </note>"), user("done report")), "<answer> 3 </answer>", False),
        ((QUESTION, assistant("<note> 6 </note>"), user("done report")), "<note> 6 </note>", False),
        ((QUESTION, assistant("<note> was it </note>"), user("done report")), "<answer> 3 </answer>", True),
    ],
)
def test_sound_compares_the_reply_with_what_its_context_implies(
    context: tuple[Message, ...], reply: str, verdict: bool | None
) -> None:
    assert Ledger().sound(context, reply) is verdict


def test_of_a_full_history_the_latest_reply_counts() -> None:
    context = (QUESTION, assistant("<note> 3 </note>"), user("+1"), assistant("<note> 4 </note>"), user("+1"))
    assert Ledger().sound(context, "<note> 5 </note>") is True


def test_one_problem_in_eight_is_held_out() -> None:
    assert EVAL_SHARE == 8
    three = Ledger(min_ops=3, max_ops=3, train_problems=30_000, eval_problems=1).problems("train")
    assert len({identity(problem) for problem in three}) / 2160 == pytest.approx(7 / 8, abs=0.02)


# --- operations that are misread ------------------------------------------------------------------------------------


def misread(*replies: str) -> list[str]:
    """What an environment shows that misreads every operation."""

    async def run() -> list[str]:
        environment = Ledger(misread=1.0).environment(TWO_OPERATIONS)
        return [(await environment.step(assistant(reply))).observations[0].content for reply in replies]

    return asyncio.run(run())


def test_an_operation_is_misread_unless_the_note_before_it_asks_to_check() -> None:
    first, second, report = misread("<note> 3 </note>", "<note> 5 </note>", "<note> 4 check </note>")
    assert first in OPERATIONS
    assert first != "+2"
    assert second != "-1"
    assert report == "done report"
    assert misread("<note> 3 check </note>", "<note> 5 check </note>") == ["+2 +2 +2", "-1 -1 -1"]
    assert misread("<note> 3 </note>", "<note> 5 </note>") == [first, second]  # siblings of a group see the same


def test_a_checked_operation_counts_once_and_half_of_the_notes_ask_for_one() -> None:
    task = Ledger(misread=0.1)
    context = (user("start 3 keep a note"), assistant("<note> 3 check </note>"), user("+2 +2 +2"))
    assert task.sound(context, "<note> 5 check </note>")
    assert not task.sound(context, "<note> 9 </note>")
    made = shown(task, 400, max_output_tokens=100)
    replies = [turn.reply for turn in made if "<note>" in turn.reply]
    assert 0.4 < sum(reply.endswith("check </note>") for reply in replies) / len(replies) < 0.6
    assert all(task.sound(turn.context, turn.reply) is not False for turn in made)
    assert "check" in set(task.corpus())
    assert "check" not in set(Ledger().corpus())
    padded = [reply for reply in replies if "kept in the note" in reply]
    assert 0.4 < len(padded) / len(replies) < 0.6
    words = (
        user("start 3 keep a note"),
        assistant("<note> 3 noted as it was said and kept in the note </note>"),
        user("+2"),
    )
    assert task.sound(words, "<note> 5 </note>")
