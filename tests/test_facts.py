"""The reading task: its episodes, its problems, its demonstrations, and what it calls sound."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import islice

import pytest
from command import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from talk import agent, engine, ignore

from condensegrpo.algorithms import segments
from condensegrpo.condensers.whole_units import Full, LastK
from condensegrpo.config.options import build_plugin
from condensegrpo.core.condenser import Condenser
from condensegrpo.core.defaults import overrides
from condensegrpo.core.errors import PluginError
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.protocols.task import Demonstration, Problem, Task
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.episodes.group import problem_groups, rollout_groups
from condensegrpo.episodes.settings import CondenseSettings
from condensegrpo.studies.tasks.facts import KEYS, NOISE, FactsTask

FOUR_PAGES = Problem(
    id="by hand",
    question="red gold",
    answer="red 7 gold 3",
    data={"pages": ["p1 rain red:7", "p2 gold:3 wind", "p3 blue:1 snow", "p4 moon wall"]},
)
PAGES = 6  # of the tasks whose whole episodes are played
READ_ALL = ("<read> p1 </read>", "<read> p2 </read>", "<read> p3 </read>", "<read> p4 </read>")


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


def page(text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id="read", name="read")


def play(*replies: str, problem: Problem = FOUR_PAGES) -> list[Step]:
    """The environment's answers to some replies; it is not asked again once it is done."""

    async def run() -> list[Step]:
        environment = FactsTask().environment(problem)
        assert await environment.start() == (user(problem.question),)
        steps: list[Step] = []
        for reply in replies:
            assert not (steps and steps[-1].done), "the episode was over before this reply"
            steps.append(await environment.step(assistant(reply)))
        return steps

    return asyncio.run(run())


def content(problem: Problem) -> tuple[str, ...]:
    return (problem.question, *problem.data["pages"])


# --- episodes -------------------------------------------------------------------------------------------------------


def test_pages_are_read_in_order_and_the_last_one_asks_for_the_report() -> None:
    steps = play(*READ_ALL, "<answer> red 7 gold 3 </answer>")
    assert [step.observations for step in steps] == [
        (page("p1 rain red:7"),),
        (page("p2 gold:3 wind"),),
        (page("p3 blue:1 snow"),),
        (page("p4 moon wall report"),),
        (),
    ]
    assert steps[-1] == Step(done=True, answer="red 7 gold 3")


def test_a_page_can_be_read_again_at_the_cost_of_a_turn_and_says_whether_the_report_is_due() -> None:
    steps = play(*READ_ALL[:2], "<read>p1</read>", *READ_ALL[2:], "<read> p1 </read>", "<answer> red 7 </answer>")
    assert steps[2].observations == (page("p1 rain red:7"),)
    assert steps[5].observations == (page("p1 rain red:7 report"),)
    assert steps[6].answer == "red 7"


@pytest.mark.parametrize("early", ["<read> p2 </read>", "<read> p4 </read>", "<read> p5 </read>"])
def test_a_page_out_of_turn_is_not_shown(early: str) -> None:
    steps = play(early, "<read> p1 </read>")
    assert [step.observations for step in steps] == [(page("not yet"),), (page("p1 rain red:7"),)]


def test_there_is_no_page_after_the_last() -> None:
    assert play(*READ_ALL, "<read> p5 </read>")[-1] == Step(observations=(page("not yet"),))


def test_an_answer_before_the_last_page_ends_the_episode_without_an_answer() -> None:
    assert play(*READ_ALL[:3], "<answer> red 7 gold 3 </answer>")[-1] == Step(done=True)


@pytest.mark.parametrize(
    "reply",
    ["", "red 7", "<answer> red 7", "<answer> </answer>", "<read> p1 p2 </read>", "<read> red </read>", "p0",
     "<answer> red <read> p1 </read> </answer>", "<read> p01 </read>", "<read> p99999 </read>"],
)  # fmt: skip
def test_what_is_neither_page_nor_answer_is_a_format_error(reply: str) -> None:
    assert play(*READ_ALL, reply)[-1] == Step(done=True)


# --- problems -------------------------------------------------------------------------------------------------------


@given(
    pages=st.integers(2, 12), facts=st.integers(1, 4), asked=st.integers(1, 3), words=st.integers(1, 4),
    early=st.floats(0.3, 1.0), index=st.integers(0, 99_999),
)  # fmt: skip
@settings(max_examples=30)
def test_facts_stand_on_early_pages_of_their_own_and_all_else_is_noise(
    pages: int, facts: int, asked: int, words: int, early: float, index: int
) -> None:
    if not asked <= facts <= int(pages * early):
        with pytest.raises(ValueError, match="at most one on each of these pages"):
            FactsTask(pages=pages, facts=facts, asked=asked, words=words, early=early)
        return
    problem = FactsTask(pages=pages, facts=facts, asked=asked, words=words, early=early).problems("train")[index]
    texts = [text.split() for text in problem.data["pages"]]
    assert [text[0] for text in texts] == [f"p{number}" for number in range(1, pages + 1)]
    assert {len(text) for text in texts} == {1 + words}
    found = [(at, *word.split(":")) for at, text in enumerate(texts) for word in text[1:] if word not in NOISE]
    assert len({at for at, _, _ in found}) == len({key for _, key, _ in found}) == len(found) == facts
    assert max(at for at, _, _ in found) < int(pages * early)
    known = {key: value for _, key, value in found}
    keys = problem.question.split()
    assert keys == sorted(keys, key=KEYS.index)
    assert len(keys) == asked
    assert problem.answer == " ".join(f"{key} {known[key]}" for key in keys)


def test_what_is_asked_cannot_be_guessed_from_the_rest() -> None:
    """Every value is a tenth of all, whatever stands beside it."""
    problems = FactsTask().problems("train")[:2000]
    values = [(problem.answer or "").split()[1] for problem in problems]
    assert all(150 < values.count(str(digit)) < 250 for digit in range(10))


def test_train_and_eval_share_no_problem_even_where_few_exist() -> None:
    few = FactsTask(pages=2, facts=1, asked=1, words=1, train_problems=10_000, eval_problems=50)
    train = {content(problem) for problem in few.problems("train")}
    held_out = {content(problem) for problem in few.problems("eval")}
    assert len(held_out) == 50
    assert not train & held_out
    assert len(train) > 1050  # of 8 · 10 · 16 problems seven eighths: every one can be drawn


def test_more_eval_problems_than_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"holding out 99 different problems of 1 pages: found \d+"):
        FactsTask(pages=1, facts=1, asked=1, words=1, early=1.0, eval_problems=99).problems("eval")


def test_whether_a_problem_is_held_out_does_not_depend_on_the_seed() -> None:
    train = {content(problem) for problem in FactsTask(train_problems=3000, seed=1).problems("train")}
    assert not train & {content(problem) for problem in FactsTask(seed=2).problems("eval")}
    assert list(FactsTask(seed=1).problems("eval")) == list(FactsTask(seed=2).problems("eval"))


def test_train_problems_are_a_sequence_in_a_fixed_order() -> None:
    problems, again = FactsTask(train_problems=20).problems("train"), FactsTask(train_problems=20).problems("train")
    assert list(problems) == [again[index] for index in range(20)]
    assert problems[-1] == problems[19]
    assert list(problems[3:5]) == [problems[3], problems[4]]
    assert len({problem.id for problem in problems}) == 20
    with pytest.raises(IndexError):
        problems[20]


def test_the_task_scales_in_pages_facts_and_noise() -> None:
    hard = FactsTask(pages=200, facts=len(KEYS), asked=len(KEYS), words=12, eval_problems=2).problems("eval")[0]
    assert len(hard.data["pages"]) == 200
    assert len((hard.answer or "").split()) == 2 * len(KEYS)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"pages": 0}, "pages is 0"),
        ({"pages": 1000}, "pages is 1000"),
        ({"words": 0}, "words is 0"),
        ({"asked": 0}, "asked is 0"),
        ({"asked": 4}, "asked=4 of facts=3"),
        ({"facts": 9, "pages": 40}, "facts is 9, wanted at most 8"),
        ({"early": 0.0}, "early is 0.0"),
        ({"early": 1.5}, "early is 1.5"),
        ({"train_problems": 0}, "train_problems is 0"),
        ({"history": "none"}, "history is 'none', wanted 'some' or 'full'"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object], found: str) -> None:
    with pytest.raises(PluginError, match=f"setting up the task '.*FactsTask'.*{found}"):
        build_plugin("tasks", f"{ROOT}/studies/tasks/facts.py:FactsTask", options)


# --- demonstrations -------------------------------------------------------------------------------------------------


def test_the_task_can_demonstrate() -> None:
    assert overrides(FactsTask(), Task.demonstrations)


def test_demonstrations_are_fixed_by_their_seed() -> None:
    assert list(islice(FactsTask().demonstrations(3), 50)) == list(islice(FactsTask().demonstrations(3), 50))
    assert list(islice(FactsTask().demonstrations(3), 50)) != list(islice(FactsTask().demonstrations(4), 50))


def test_with_full_history_every_page_is_shown_and_every_reply_is_sound() -> None:
    task = FactsTask(pages=6, history="full")
    for one in islice(task.demonstrations(0), 200):
        read = [message.content.split()[0] for message in one.context if message.role == "tool"]
        assert read[:6] == ["p1", "p2", "p3", "p4", "p5", "p6"][: len(read)]
        assert task.sound(one.context, one.reply) is True


@pytest.fixture(scope="module")
def demonstrated() -> list[Demonstration]:
    return list(islice(FactsTask().demonstrations(0), 4000))


def test_where_a_fact_is_out_of_sight_half_of_the_demonstrations_guess(demonstrated: list[Demonstration]) -> None:
    task = FactsTask()
    unsound = [one for one in demonstrated if not task.sound(one.context, one.reply)]
    assert all(one.reply.startswith("<answer>") for one in unsound)
    due = [one for one in demonstrated if one.context[-1].content.endswith("report")]
    missing = [one for one in due if one.reply.startswith("<read>")]
    assert len(unsound) / (len(unsound) + len(missing)) == pytest.approx(0.5, abs=0.05)
    assert len(missing) > 300
    known = sum(one.reply.startswith("<answer>") for one in due) - len(unsound)
    assert 0.4 < known / len(due) < 0.9  # of the reports with everything in sight


def test_the_corpus_has_every_word_of_questions_pages_and_replies(demonstrated: list[Demonstration]) -> None:
    words = {word for text in FactsTask().corpus() for word in text.split()}
    texts = [text for one in demonstrated for text in (*(m.content for m in one.context), one.reply)]
    used = {word for text in texts for word in text.split()}
    assert used - words == set()
    assert words - used <= {"not", "yet"}


# --- what is sound --------------------------------------------------------------------------------------------------

QUESTION = user("red gold")
P1, P2, P3 = page("p1 rain red:7"), page("p2 gold:3 wind"), page("p3 blue:1 snow")
P4 = page("p4 moon wall report")
READ = assistant("<read> p1 </read>")  # which page it names does not matter


@pytest.mark.parametrize(
    ("context", "reply", "verdict"),
    [
        ((QUESTION,), "<read> p1 </read>", True),
        ((QUESTION,), "<read> p2 </read>", False),
        ((QUESTION, READ, P1, READ, P3), "<read> p4 </read>", True),
        ((QUESTION, READ, P1, READ, P3), "<read> p2 </read>", False),  # not before the report
        ((QUESTION, READ, P1, READ, P2, READ, P4), "<answer> red 7 gold 3 </answer>", True),
        ((QUESTION, READ, P1, READ, P2, READ, P4), "<answer> gold 3 red 7 </answer>", False),  # as asked
        ((QUESTION, READ, P1, READ, P2, READ, P4), "<read> p3 </read>", False),  # for nothing
        ((QUESTION, READ, P1, READ, P4), "<read> p2 </read>", True),
        ((QUESTION, READ, P1, READ, P4), "<read> p3 </read>", True),  # it could be there
        ((QUESTION, READ, P1, READ, P4), "<read> p1 </read>", False),  # in sight
        ((QUESTION, READ, P1, READ, P4), "<answer> red 7 gold 3 </answer>", False),  # a guess, if a lucky one
        ((QUESTION, READ, P1, READ, P4), "<read> p19 </read>", False),  # there is none
    ],
)
def test_sound_compares_the_reply_with_what_its_context_implies(
    context: tuple[Message, ...], reply: str, verdict: bool
) -> None:
    assert FactsTask().sound(context, reply) is verdict


# --- whole episodes -------------------------------------------------------------------------------------------------


def careful(prompt: str) -> str:
    """An agent that reads on, answers from what it is shown alone, and reads again what is out of sight."""
    question, *rest = [part.partition("\n")[2].partition("<|im_end|>")[0] for part in prompt.split("<|im_start|>")[1:]]
    pages = [text.split() for text in rest if text.startswith("p")]
    if not pages or pages[-1][-1] != "report":
        return f"<read> p{int(pages[-1][0][1:]) + 1 if pages else 1} </read>"
    keys = question.split()
    facts = dict(word.split(":") for words in pages for word in words if ":" in word)
    if all(key in facts for key in keys):
        return f"<answer> {' '.join(f'{key} {facts[key]}' for key in keys)} </answer>"
    shown = {int(words[0][1:]) for words in pages}
    return f"<read> p{min(set(range(1, PAGES + 1)) - shown)} </read>"


def played(
    task: FactsTask,
    condenser: Condenser,
    *,
    max_turns: int,
    reply: Callable[[str], str] = careful,
    max_context_tokens: int = 1000,
) -> list[Trajectory]:
    async def run() -> list[Trajectory]:
        groups = await rollout_groups(
            problem_groups(task.problems("eval"), 7),
            samples=1,
            environment=task.environment,
            engine=engine(
                agent(reply),
                condenser=condenser,
                max_turns=max_turns,
                max_context_tokens=max_context_tokens,
                trigger=CondenseSettings(when="over_budget", threshold=0.75) if max_context_tokens < 1000 else None,
            ),
            run_seed=0,
            step=0,
            on_finish=ignore,
        )
        return [one for group in groups for one in group]

    return asyncio.run(run())


def solved(task: FactsTask, played_ones: Sequence[Trajectory]) -> list[bool]:
    return [
        one.stop is StopReason.ANSWERED and one.answer == posed.answer
        for one, posed in zip(played_ones, task.problems("eval"), strict=True)
    ]


def test_with_the_full_history_one_turn_a_page_and_one_for_the_answer_are_enough() -> None:
    task = FactsTask(pages=PAGES, eval_problems=8)
    episodes = played(task, Full(), max_turns=7)
    assert all(solved(task, episodes))
    assert all(segments.broken_invariants(one) == () for one in episodes)


def test_a_fact_that_was_dropped_is_in_no_later_context_and_cannot_be_answered() -> None:
    task = FactsTask(pages=PAGES, facts=2, asked=1, eval_problems=8)
    episodes = played(task, LastK(keep_last=2), max_turns=7)
    for one, posed in zip(episodes, task.problems("eval"), strict=True):
        fact = (posed.answer or "?").replace(" ", ":")
        assert fact in "\n".join(message.content for turn in one.turns for message in turn.context)
        assert fact not in "\n".join(message.content for message in one.turns[-1].context)
    assert not any(solved(task, episodes))


def test_with_turns_to_spare_a_dropped_fact_is_read_again() -> None:
    task = FactsTask(pages=PAGES, facts=2, asked=1, eval_problems=8)
    episodes = played(task, LastK(keep_last=2), max_turns=10)
    assert all(solved(task, episodes))
    assert all(7 < len(one.turns) <= 10 for one in episodes)  # the page of the fact is one of the first three
