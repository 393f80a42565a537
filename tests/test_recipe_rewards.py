"""The rewards of the published recipes, by hand."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from builders import assistant, trajectory, turn, user

from condensegrpo.config.options import build_plugin
from condensegrpo.core.errors import PluginError
from condensegrpo.core.messages import MediaPart, Message
from condensegrpo.core.protocols.reward import Reward, RewardResult
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import Score, StopReason, Trajectory, Turn
from condensegrpo.episodes.scoring import score
from condensegrpo.rewards import mathematics
from condensegrpo.rewards.context import InverseMaxContext
from condensegrpo.rewards.format import Format, XmlFormat, XmlFormatAws, XmlTags
from condensegrpo.rewards.matches import code_of, last_number
from condensegrpo.rewards.mathematics import equal
from condensegrpo.rewards.outcome import AnswerContains, Answered, Correct, ExactMatch
from condensegrpo.rewards.turns import AnswerInResults, CodeExecution, good_calls
from condensegrpo.sandbox.sandbox import Sandbox

PARIS = Problem(id="p", question="?", answer="Paris", data={"aliases": ["Paris", "City of Light"]})
SUM = Problem(id="s", question="?", answer="72")
ADD = Problem(
    id="m",
    question="?",
    answer="",
    data={"tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"], "entry": ["add"]},
)
GOOD = "def add(a, b):\n    return a + b"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as shared:
        yield shared


def result(text: str, *, tag: str = "result", name: str | None = "search") -> Message:
    return replace(user(f"<{tag}>{text}</{tag}>"), tool_call_id="call_0", name=name)


def reply(text: str, *results: Message) -> Turn:
    return turn([1, 2], [3], reply=text, observations=results)


def said(*replies: Turn | str, answer: str | None = "Paris", stop: StopReason = StopReason.ANSWERED) -> Trajectory:
    return trajectory(*(one if isinstance(one, Turn) else reply(one) for one in replies), answer=answer, stop=stop)


def total(reward: Any, one: Trajectory, problem: Problem = PARIS) -> float:
    return RewardResult.of(reward(one, problem)).total


# --- outcome ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "stop", "worth"),
    [
        ("72", StopReason.ANSWERED, 1.0),
        ("$72.00", StopReason.ANSWERED, 1.0),
        ("71", StopReason.ANSWERED, 0.1),
        (None, StopReason.TURN_LIMIT, 0.0),
        (None, StopReason.OUTPUT_LENGTH, 0.0),
    ],
)
def test_answered_pays_a_wrong_answer_a_little(answer: str | None, stop: StopReason, worth: float) -> None:
    assert total(Answered(), said("x", answer=answer, stop=stop), SUM) == worth


@pytest.mark.parametrize(
    ("answer", "exact", "contains"),
    [
        (" PARIS ", 1.0, 1.0),
        ("city of light", 1.0, 1.0),
        ("It is Paris.", 0.0, 1.0),
        ("Rome", 0.0, 0.0),
        ("", 0.0, 0.0),
        (None, 0.0, 0.0),
    ],
)
def test_an_answer_equals_an_alias_or_holds_one(answer: str | None, exact: float, contains: float) -> None:
    assert total(ExactMatch(), said("x", answer=answer)) == exact
    assert total(AnswerContains(), said("x", answer=answer)) == contains


def test_a_truncated_answer_earns_nothing() -> None:
    cut = said("<answer>Paris</answer>", answer=None, stop=StopReason.OUTPUT_LENGTH)
    assert total(ExactMatch(), cut) == total(AnswerContains(), cut) == 0


@pytest.mark.parametrize("reward", [ExactMatch(), AnswerContains(), AnswerInResults()])
def test_a_problem_without_ground_truth_is_an_error(reward: Any) -> None:
    nothing = Problem(id="n", question="?")
    with pytest.raises(ValueError, match="problem n: it has no ground truth"):
        (reward.turn_rewards if isinstance(reward, AnswerInResults) else reward)(said("x"), nothing)


# --- turns ------------------------------------------------------------------------------------------------------------


def test_code_execution_pays_the_share_of_good_calls_and_each_of_them() -> None:
    one = said(
        reply("a", result("24", tag="output"), result("Error: python: …", tag="output")),
        reply("b", result(" ", tag="output"), result("no exception here", tag="output")),
        reply("c"),
    )
    paid = CodeExecution().turn_rewards(one, SUM)
    assert paid == pytest.approx((0.3 / 4 + 0.05, 0.3 / 4 + 0.05, 0.0))
    assert sum(paid) == pytest.approx(0.3 * 2 / 4 + 0.05 * 2)


@pytest.mark.parametrize("text", ["", "Traceback (most recent call last): …", "NameError: x", "Error: blocked"])
def test_a_call_that_printed_nothing_or_failed_is_not_good(text: str) -> None:
    assert CodeExecution().turn_rewards(said(reply("a", result(text, tag="output"))), SUM) == (0.0,)


def test_without_a_valid_call_nothing_is_paid() -> None:
    malformed = reply("a", result("Error: cannot be read", name=None))
    assert CodeExecution().turn_rewards(said(malformed, "b"), SUM) == (0.0, 0.0)


def test_the_answer_is_looked_for_in_the_first_result_only() -> None:
    first, second = result("all about PARIS"), result("nothing")
    assert AnswerInResults().turn_rewards(said("think", reply("a", first, second), "b"), PARIS) == (0.0, 1.0, 0.0)
    assert AnswerInResults().turn_rewards(said(reply("a", second, first), reply("b", first)), PARIS) == (0.0, 0.0)


def test_a_picture_is_a_good_result_and_the_digits_that_name_it_are_no_answer() -> None:
    picture = MediaPart.of(b"7abc", "image/png")
    assert "94" in picture.text  # of its hash
    shown = reply(
        "a",
        result("clicked").showing([picture]),
        Message(role="tool", content=(picture,), tool_call_id="call_1", name="look"),
    )
    assert AnswerInResults().turn_rewards(said(shown), Problem(id="p", question="?", answer="94")) == (0.0,)
    assert good_calls(shown) == 2


def test_an_observation_that_no_tool_gave_is_no_result() -> None:
    assert AnswerInResults().turn_rewards(said(turn([1], [2], observations=[user("Paris")])), PARIS) == (0.0,)


# --- format -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "form", "tags"),
    [
        ("<reasoning>a</reasoning>\n<answer>b</answer>", 1.0, 1.0),
        ('<reasoning>a</reasoning> <tool>{"name": "x"}</tool>', 1.0, 1.0),
        ("<answer>b</answer>", 0.6, 1.0),
        ("<reasoning>a</reasoning>", 0.6, 1.0),
        ("well <reasoning>a</reasoning> <answer>b</answer> done", 0.6, 1.0),
        ("<reasoning>a</reasoning> <answer>b", 0.8, 0.75),
        ("<reasoning>a <answer>b", 0.4, 0.5),
        ("b</answer>", 0.4, 0.5),
        ("<tool>{}</tool> <answer>b</answer>", 0.6, 1.0),
        ("<reasoning>a</reasoning><reasoning>a</reasoning><answer>b</answer>", 1.0, 0.5),
        ("no tags", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_replies_are_paid_for_their_tags(text: str, form: float, tags: float) -> None:
    assert total(XmlFormat(), said(text)) == pytest.approx(form)
    assert total(XmlTags(), said(text)) == pytest.approx(tags)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("<reasoning>a</reasoning>\n<answer>b</answer>", 1.0),  # 0.4·2/2 + 0.3 + 0.3
        ("<answer>b</answer>", 0.5),  # 0.4·1/2 + 0.3
        ("<reasoning>a</reasoning>", 0.5),
        ("well <reasoning>a</reasoning> <answer>b</answer> done", 0.4),
        ("<reasoning>a</reasoning> <answer>b", 0.5),
        ("<reasoning> </reasoning> <answer>b</answer>", 0.8),  # a blank field is not there
        ("<reasoning>a</reasoning> <tool>{}</tool> <answer>b</answer>", 1.0),  # the sample: 0.4·3/2 + 0.6
        ("b</answer>", 0.3),
        ("no tags", 0.0),
    ],
)
def test_the_format_of_the_aws_sample_has_no_share_for_spacing(text: str, form: float) -> None:
    assert total(XmlFormatAws(), said(text)) == pytest.approx(form)


@pytest.mark.parametrize(
    ("text", "form", "aws", "tags"),
    [
        ("<reasoning>a</reasoning>\n<code>b</code>", 1.0, 1.0, 1.0),
        ("<code>b</code>", 0.6, 0.5, 1.0),
        ("<reasoning>a</reasoning>\n<code>b", 0.8, 0.5, 0.75),
        ("<reasoning>a</reasoning>\n<tool>b</tool>", 0.6, 0.5, 1.0),  # no field of these sets
    ],
)
def test_the_sets_of_tags_are_an_option(text: str, form: float, aws: float, tags: float) -> None:
    options = {"fields": [["reasoning"], ["code", "answer"]]}
    found = [
        total(build_plugin("rewards", name, options), said(text))
        for name in ("xml_format", "xml_format_aws", "xml_tags")
    ]
    assert found == pytest.approx([form, aws, tags])
    assert total(XmlFormat(), said("<reasoning>a</reasoning>\n<code>b</code>")) == pytest.approx(0.6)


def test_a_set_without_tags_is_refused() -> None:
    with pytest.raises(PluginError, match="the option fields"):
        build_plugin("rewards", "xml_format", {"fields": [["reasoning"], []]})


def test_the_format_is_the_mean_over_all_replies() -> None:
    assert total(XmlFormat(), said("<answer>b</answer>", "none")) == pytest.approx(0.3)
    assert RewardResult.of(XmlFormat()(said("<reasoning>a</reasoning><answer>b</answer>"), PARIS)).correct == 0


def test_a_summary_is_no_reply_with_a_form() -> None:
    summary = replace(reply("Facts: none"), kind="condense")
    one = said("<reasoning>a</reasoning><tool>b</tool>", summary, "<reasoning>a</reasoning><answer>Paris</answer>")
    assert [total(reward(), one) for reward in (XmlFormat, XmlFormatAws, XmlTags)] == pytest.approx([1.0, 1.0, 1.0])
    assert total(Format(min_reply_chars=20), one) == 1.0


# --- matches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("It is 72.", 72.0),
        ("3 and 4 make 7, not 8", 8.0),
        ("$1,080", 1080.0),
        ("3.14", 3.14),
        ("−5", -5.0),
        ("costs $-5", -5.0),
        ("1,2", 2.0),
        ("each gets 72/3", 24.0),
        ("1/0", None),
        ("none", None),
        ("x2", None),
        ("1.5e3", 1500.0),
        ("about -2E-3 m", -0.002),
        ("3 eggs", 3.0),
    ],
)
def test_the_last_number_of_a_text(text: str, value: float | None) -> None:
    assert last_number(text) == value


@pytest.mark.parametrize(
    ("answer", "truth", "same"),
    [
        (r"\frac{1}{2}", "0.5", True),
        ("5", "5", True),
        ("3", "3.14", False),
        ("(x+1)^2", "x^2+2x+1", True),
        (r"$\sqrt{8}$", r"2\sqrt{2}", True),
        ("1,000", "1000", True),
        ("", "1", False),
        ("}{", "1", False),
        ("\ud800", "1", False),
        ("9" * 5000, "9", False),
        (r"\$5", "5", True),
        (r"\$32,\!348", "32348", True),
        ("½", "0.5", True),
        ("3½", "7/2", True),
        ("√2", r"\sqrt{2}", True),
        ("2√3", "2", False),
        ("√(x+1)", r"\sqrt{x+1}", True),
        ("x²", "x^2", True),
        ("10⁻³", "0.001", True),
        ("(-∞,3]", r"(-\infty,3]", True),
    ],
)
def test_mathematics_is_compared_by_value(answer: str, truth: str, same: bool) -> None:
    assert equal(answer, truth) is same


@pytest.mark.parametrize("truth", [r"\$5", r"\$32,\!348", "½", "3½", "√2", "∛8", "x²", "x⁻¹", "∞", "1.5e3", "$5$"])
def test_a_truth_equals_itself(truth: str) -> None:
    Correct(match="math").check_problem(Problem(id="p", question="?", answer=truth))


@pytest.mark.parametrize(
    ("match", "truth", "complaint"),
    [
        ("math", "=", "the ground truth '=' cannot be read as mathematics"),
        ("math", "x" * 2001, "cannot be read as mathematics"),
        ("math", None, "it has no ground truth"),
        ("exact", "  ", "it has no ground truth"),
        ("number", "seven", "its ground truth 'seven' is not a number"),
        ("last_number", "3 of 4", "its ground truth '3 of 4' given as the answer is not right"),
        ("words", "(*)", "given as the answer is not right"),
    ],
)
def test_a_truth_that_no_answer_can_equal_is_named(match: Any, truth: str | None, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        Correct(match=match).check_problem(Problem(id="p", question="?", answer=truth))


def test_an_answer_is_not_compared_with_mathematics_that_cannot_be_read() -> None:
    with pytest.raises(ValueError, match="the ground truth '=' cannot be read as mathematics"):
        Correct(match="math")(said("x", answer="5"), Problem(id="n", question="?", answer="="))


def test_mathematics_that_takes_for_ever_is_killed_and_the_next_pair_is_compared() -> None:
    assert equal("10^{10^{10}}", "1", seconds=0.5) is False
    assert equal("1/2", "0.5") is True


def test_mathematics_has_its_seconds_of_the_cpu_however_long_it_waits_for_one() -> None:
    """A process that stands still uses none of them: stopped for longer than its limit, it still answers."""
    assert equal("1/2", "0.5") is True
    worker = mathematics._worker
    assert worker is not None
    os.kill(worker._process.pid, signal.SIGSTOP)
    threading.Timer(0.6, os.kill, (worker._process.pid, signal.SIGCONT)).start()
    assert equal("1/3", r"\frac{2}{6}", seconds=0.5) is True
    assert mathematics._worker is worker


def test_a_fork_of_the_program_does_not_stop_its_comparison_of_mathematics() -> None:
    assert equal("1/2", "0.5") is True
    worker, owner = mathematics._worker, os.getpid()
    assert worker is not None
    if (child := os.fork()) == 0:
        mathematics._stop_in(owner)  # what its exit calls
        os._exit(0)
    os.waitpid(child, 0)
    assert equal("1/3", r"\frac{2}{6}") is True
    assert mathematics._worker is worker


@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        (GOOD, 1.0),
        (f"Here it is:\n```python\n{GOOD}\n```\nDone.", 1.0),
        (f"```python\nimport nothing\n```\nbetter:\n```python\n{GOOD}\n```", 1.0),
        ("def add(a, b):\n    return a - b", 0.0),
        ("import sys\nsys.exit(0)", 0.0),
        (f"{GOOD}\nimport os\nos._exit(0)", 0.0),
        ("print('passed')", 0.0),
        ("def add(:", 0.0),
    ],
)
def test_code_is_right_if_it_passes_its_tests(sandbox: Sandbox, answer: str, passes: float) -> None:
    assert total(Correct(match="tests", sandbox=sandbox), said("x", answer=answer), ADD) == passes


def test_a_reward_that_runs_code_needs_a_sandbox() -> None:
    with pytest.raises(ValueError, match="match='tests' runs code and found no sandbox"):
        Correct(match="tests")


def test_code_without_a_fence_is_all_of_the_answer() -> None:
    assert code_of(GOOD) == GOOD


@pytest.mark.parametrize("match", ["exact", "number", "last_number", "alias", "contains", "words", "math", "tests"])
def test_nothing_is_right_without_ground_truth_whatever_the_match(sandbox: Sandbox, match: Any) -> None:
    with pytest.raises(ValueError, match="problem n"):
        Correct(match=match, sandbox=sandbox)(said("x", answer="therefore 5"), Problem(id="n", question="?"))


def test_a_short_correct_answer_is_valid_and_a_minimum_can_be_asked_for() -> None:
    one, problem = said("5", answer="5"), Problem(id="f", question="?", answer="5")
    assert total(InverseMaxContext(match="math", domain="math"), one, problem) == 0.5
    assert total(InverseMaxContext(match="math", min_last_reply_chars=2), one, problem) == 0


@pytest.mark.parametrize(("answer", "valid"), [(GOOD, True), ("no code at all here", False), ("", False)])
def test_in_the_domain_coding_the_answer_is_code(sandbox: Sandbox, answer: str, valid: bool) -> None:
    scored = RewardResult.of(
        InverseMaxContext(match="tests", domain="coding", sandbox=sandbox)(said("x", answer=answer), ADD)
    )
    assert scored.format_valid is valid


def test_an_essay_is_no_value_in_the_domain_math() -> None:
    scored = RewardResult.of(InverseMaxContext(match="math", domain="math")(said("x", answer="5 " * 200), SUM))
    assert scored.format_valid is False


@pytest.mark.parametrize(
    "name", ["answered", "exact_match", "answer_contains", "xml_format", "xml_format_aws", "xml_tags"]
)
def test_every_reward_of_the_recipes_is_built_by_name(name: str) -> None:
    assert callable(build_plugin("rewards", name, {}))


@pytest.mark.parametrize(
    ("reward", "correct"), [(ExactMatch(), 1.0), (AnswerContains(), 1.0), (XmlFormat(), 0.0), (XmlTags(), 0.0)]
)
def test_used_alone_the_rewards_of_form_call_no_answer_correct(reward: Reward, correct: float) -> None:
    scored = score(said("<answer>Paris</answer>", answer="Paris"), PARIS, reward)
    assert isinstance(scored, Score)
    assert scored.correct == correct


def test_a_blank_reply_is_not_paid() -> None:
    assert total(Answered(), said("", "72", answer="72"), SUM) == 0
    assert assistant("").content == ""
